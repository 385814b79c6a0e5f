"""Lets children notice that their parent has ended, even by SIGKILL.

The parent holds the only write end of a pipe; children hold the read end, which reaches end of file
when the parent is gone.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

LIFELINE_VARIABLE = "BATCHWAY_LIFELINE_FD"  # internal: set by `batchway up` for its children


@contextlib.contextmanager
def lifeline() -> Iterator[int]:
    """Yields the read end for children; this process keeps the write end."""
    read_fd, write_fd = os.pipe()
    try:
        yield read_fd
    finally:
        os.close(write_fd)
        os.close(read_fd)


def end_with_parent(grace_s: float) -> None:
    """Ends this process after its parent: SIGTERM, then SIGKILL after `grace_s`. Does nothing
    without a lifeline."""
    fd = os.environ.pop(LIFELINE_VARIABLE, None)
    if fd is None:
        return
    os.set_inheritable(int(fd), False)
    threading.Thread(
        target=_wait_and_end, args=(int(fd), grace_s), name="lifeline", daemon=True
    ).start()


def _wait_and_end(fd: int, grace_s: float) -> None:
    while os.read(fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
