"""Where the running `batchway up` of this user is: for commands that are not told which Redis.

`up` with a Redis of its own leaves a note beside that server's socket, in a directory that only
its user may read and that goes with the server.
"""

import contextlib
import os
import tempfile
from pathlib import Path

import msgspec

_NOTE = "up.json"


class RunningUp(msgspec.Struct, frozen=True):
    """One running `batchway up`."""

    pid: int
    redis_url: str
    namespace: str
    gateway_url: str


def leave_note(directory: Path, up: RunningUp) -> None:
    """`directory` is that of the server's socket."""
    (directory / _NOTE).write_bytes(msgspec.json.encode(up))


def running_ups() -> list[RunningUp]:
    """Those of this user that run now on a Redis of their own."""
    found = {}
    for folder in {tempfile.gettempdir(), "/tmp"}:  # noqa: S108 - only what is ours is read
        for note in Path(folder).glob(f"batchway-*/{_NOTE}"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                if note.parent.lstat().st_uid != os.getuid():
                    continue
                up = msgspec.json.decode(note.read_bytes(), type=RunningUp)
                os.kill(up.pid, 0)
                found[up.pid] = up
    return [found[pid] for pid in sorted(found)]
