"""Settings of glibc's malloc, so that a process returns memory after large calls."""

import contextlib
import ctypes

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h
_LARGE_BYTES = 128 * 1024
_NUM_ARENAS = 2


def give_back_memory() -> None:
    """Makes malloc return large blocks to the system when they are freed, and use few arenas. By
    default malloc raises its limit for large blocks up to 32 MiB as soon as one is freed, and each
    arena keeps what is below its last used block. Has no effect with another malloc.

    After 80 refused calls of 3.9 MB a gateway had kept 110 MB; with this, 30 MB.
    """
    with contextlib.suppress(OSError, AttributeError):  # it has no mallopt, as on macOS
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)
