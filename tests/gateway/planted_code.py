"""What code of an attacker would try in a process for untrusted input, which runs this module."""

import ctypes
import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.child import serve

SECRET = b"hush"
_SEIZE, _GET_NO_NEW_PRIVS = 0x4206, 39  # of ptrace(2), which stops nothing, and prctl(2)
LIBC = ctypes.CDLL(None, use_errno=True)
# Before the gateway's first message: what a process starts with.
ENVIRON = sorted(os.environ)
FILES = sorted({os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in range(3)})


class Words(ctypes.Structure):
    """iovec(3)."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def done(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")


def read_memory(pid: int, address: int) -> None:
    found = ctypes.create_string_buffer(len(SECRET))
    ours, theirs = (Words(at, len(SECRET)) for at in (ctypes.addressof(found), address))
    done(LIBC.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0))
    assert found.raw == SECRET


def read_memory_file(pid: int, address: int) -> None:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        assert memory.read(len(SECRET)) == SECRET


def fork() -> None:
    if os.fork() == 0:
        os._exit(0)
    os.wait()


def attempts(pid: int, address: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """`pid`: the gateway; `address`: of a secret in its memory."""
    return {
        "read the gateway's environment": lambda: Path(f"/proc/{pid}/environ").read_bytes(),
        "read its memory": lambda: read_memory(pid, address),
        "read its memory as a file": lambda: read_memory_file(pid, address),
        "list its files": lambda: os.listdir(f"/proc/{pid}/fd"),
        "open its files": lambda: os.open(f"/proc/{pid}/fd/2", os.O_WRONLY),
        "get a handle of it": lambda: os.pidfd_open(pid),
        "trace it": lambda: done(LIBC.ptrace(_SEIZE, pid, None, None)),
        "signal it": lambda: os.kill(pid, signal.SIGURG),
        "read a file": lambda: (folder / "kept").read_bytes(),
        "write a file": lambda: (folder / "new").write_bytes(b""),
        "shorten a file": lambda: os.truncate(folder / "shortened", 0),
        "delete a file": lambda: (folder / "deleted").unlink(),
        "make a folder": lambda: (folder / "made").mkdir(),
        "reach the network": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "reach a local server": lambda: socket.socket(socket.AF_UNIX),
        "start a process": fork,
        "lift a limit": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    }


def outcomes(pid: int, address: int, folder: str) -> dict[str, str]:
    """The error of each attempt; "" if it did what it should not."""
    found = {}
    for name, attempt in attempts(pid, address, Path(folder)).items():
        try:
            attempt()
            found[name] = ""
        except (OSError, ValueError) as exc:
            found[name] = type(exc).__name__
    return found


def prepare(_: Any) -> Callable[[Any], str]:
    def answer(request: Any) -> str:
        return json.dumps(
            {
                "outcomes": outcomes(*request),
                "environ": ENVIRON,
                "files": FILES,
                "users": os.getresuid(),
                "no_new_privs": LIBC.prctl(_GET_NO_NEW_PRIVS, 0, 0, 0, 0),
            }
        )

    return answer


if __name__ == "__main__":
    serve(prepare)
