"""Takes from a process what it does not need to answer with: files, sockets, other processes.

On Linux also writing to the file system, and what a program of the same user may do to another:
Landlock forbids that, or the process gets a user of its own. Elsewhere less is taken. Reasons:
docs/decisions/template-process.md.
"""

import ctypes
import os
import resource
import sys
from contextlib import suppress

_IS_LINUX = sys.platform == "linux"
_SET_DUMPABLE, _SET_NO_NEW_PRIVS = 4, 38  # options of prctl(2)
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # numbers of landlock(7)'s calls, on every processor
_VERSION = 1  # a flag: the kernel's version of Landlock is asked for
_FIRST_UID, _NOBODY = 1_500_000_000, 65_534  # the former plus the process's id; beyond those in use


def confine() -> None:
    """Nothing can be opened or imported from now on, and no process or thread started. What the
    system does not know is left out."""
    if os.geteuid() == 0:
        _give_up_root()
    if _IS_LINUX:
        _prctl(_SET_NO_NEW_PRIVS, 1)
        _forbid_by_landlock()
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (0, 0))


def hide_memory() -> None:
    """Keeps the memory of this process from confined ones of its user, where Landlock does not."""
    if _IS_LINUX and landlock_version() < 1:
        _prctl(_SET_DUMPABLE, 0)


def landlock_version() -> int:
    """0 or less if the kernel has none."""
    return _call(_CREATE_RULESET, None, 0, _VERSION)


def _give_up_root() -> None:
    """Takes a user that no other process has; where user namespaces leave out its number, nobody's.
    Root without the right to do so stays root."""
    for uid in (_FIRST_UID + os.getpid(), _NOBODY):
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            return


def _forbid_by_landlock() -> None:
    """Forbids all that this kernel's version can forbid, without exceptions."""
    version = landlock_version()
    if version < 1:
        return
    files = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    tcp, signals = 0b11 * (version >= 4), 0b11 * (version >= 6)
    rules = (ctypes.c_uint64 * 3)(files, tcp, signals)
    ruleset = _call(_CREATE_RULESET, rules, ctypes.sizeof(rules), 0)
    if ruleset >= 0:
        _call(_RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


def _call(number: int, *arguments: object) -> int:
    """A system call that Python does not know. Negative if it fails."""
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(number), *words))
