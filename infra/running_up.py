"""Finds this user's running `batchway up`, for commands without a Redis URL.

`up` with a private Redis writes a note beside the server's socket, in a directory that only its
user can read and that is removed with the server.
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


def write_note(directory: Path, up: RunningUp) -> None:
    """Writes the note. `directory` contains the server's socket."""
    (directory / _NOTE).write_bytes(msgspec.json.encode(up))


def running_ups() -> list[RunningUp]:
    """This user's running `batchway up` processes that have a private Redis: those of TMPDIR, or
    else of /tmp, where the socket is if TMPDIR's path is too long for one."""
    return _noted_in(tempfile.gettempdir()) or _noted_in("/tmp")  # noqa: S108 - only reads ours


def _noted_in(folder: str) -> list[RunningUp]:
    found = {}
    for note in Path(folder).glob(f"batchway-*/{_NOTE}"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if note.parent.lstat().st_uid != os.getuid():
                continue
            up = msgspec.json.decode(note.read_bytes(), type=RunningUp)
            os.kill(up.pid, 0)
            found[up.pid] = up
    return [found[pid] for pid in sorted(found)]
