"""Makes glibc's malloc return memory to the system after large calls."""

import asyncio
import contextlib
import ctypes

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h
_LARGE_BYTES = 128 * 1024
_NUM_ARENAS = 2
_TRIM_S = 10.0


def give_back_memory() -> None:
    """Makes malloc return large blocks to the system when they are freed, and use few arenas. By
    default malloc raises its limit for large blocks up to 32 MiB as soon as one is freed, and each
    arena keeps what is below its last used block. Has no effect with another malloc.

    After 80 refused calls of 3.9 MB a gateway had kept 110 MB; with this 30 MB, and 10 MB with
    `keep_trimmed`.
    """
    with contextlib.suppress(OSError, AttributeError):  # it has no mallopt, as on macOS
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)


async def keep_trimmed() -> None:
    """Returns free pages below used ones to the system, again and again, until cancelled. Each time
    takes a few milliseconds. Has no effect with another malloc."""
    with contextlib.suppress(OSError, AttributeError):
        malloc_trim = ctypes.CDLL(None).malloc_trim
        while True:
            await asyncio.sleep(_TRIM_S)
            malloc_trim(0)
