"""Processes for untrusted input can do nothing but answer, whoever runs the gateway."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.child import _LATER
from gateway.confinement import landlock_version

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems take less away")

# A gateway with a secret in its environment and its memory. A process that is none of its pool's
# shows what an attempt could do.
_GATEWAY = """
import asyncio, ctypes, os, subprocess, sys
from gateway import confinement
from gateway.child_process import ChildLimits, ChildPool
from tests.gateway.planted_code import SECRET

kind, folder = sys.argv[1:]
secret = ctypes.create_string_buffer(SECRET)
request = [os.getpid(), ctypes.addressof(secret), folder]
module = "tests.gateway.planted_code"
if kind == "free":
    code = f"import json; from {module} import *; print(json.dumps(outcomes(*{request})))"
    sys.exit(subprocess.call([sys.executable, "-c", code]))
if kind == "without Landlock":
    confinement.landlock_version = lambda: -1
    module += "_without_landlock"
print(asyncio.run(ChildPool(module, {}, ChildLimits()).ask(request)))
"""
# Root gives its process another user, which none of these needs Landlock for.
_NEEDS_LANDLOCK = {"signal it", "shorten a file", "delete a file", "make a folder"}
USERS = ("whoever runs the tests", "an ordinary user")


def attempted(kind: str, user: str, folder: Path) -> Any:
    """What planted code reports. An ordinary user, for root: one with root's files, as tests may
    lie there, but without any right."""
    before: list[str] = []
    if user == USERS[1] and os.geteuid() == 0:
        before = ["unshare", "--user"]
        if subprocess.run([*before, "true"], capture_output=True).returncode:
            pytest.skip("root may not make a user namespace here")
    for name in ("kept", "shortened", "deleted"):
        (folder / name).write_text("text")
    command = [*before, sys.executable, "-c", _GATEWAY, kind, str(folder)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KEY": "hush"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def successes(outcomes: dict[str, str], user: str = USERS[0]) -> set[str]:
    """What was possible. The kernel counts no processes of root's, also not in a namespace."""
    uncounted = {"start a process"} if user == USERS[1] and os.geteuid() == 0 else set()
    return {name for name, error in outcomes.items() if not error} - uncounted


@pytest.mark.parametrize("user", USERS)
def test_a_process_that_is_not_confined_can_do_it_all(user: str, tmp_path: Path) -> None:
    """So each attempt works where nothing forbids it."""
    outcomes = attempted("free", user, tmp_path)
    hardened = {name for name in ("trace it", "read its memory") if outcomes[name]}  # as by Yama
    assert successes(outcomes) >= outcomes.keys() - hardened - {"read its memory as a file"}


@pytest.mark.parametrize("user", USERS)
def test_planted_code_can_do_nothing(user: str, tmp_path: Path) -> None:
    """Neither to the gateway nor to files, servers or its own limits; it has no environment, and
    can gain no right."""
    report = attempted("confined", user, tmp_path)
    allowed = set[str]()
    if report["users"] == [os.geteuid()] * 3 or user == USERS[1]:
        allowed = _NEEDS_LANDLOCK if landlock_version() < 1 else set()
        allowed |= {"signal it"} if landlock_version() < 6 else set()
    assert successes(report["outcomes"], user) == allowed
    assert set(report["environ"]) <= {"LC_CTYPE", "LD_LIBRARY_PATH"}  # the former is Python's own
    assert report["files"] == ["/dev/null", "socket"]
    assert report["no_new_privs"] == 1
    assert 0 not in report["users"]


@pytest.mark.parametrize("user", USERS)
def test_the_gateways_memory_is_hidden_without_landlock(user: str, tmp_path: Path) -> None:
    """Its environment too; nothing can be opened. What remains is in docs/decisions."""
    report = attempted("without Landlock", user, tmp_path)
    is_root = os.geteuid() == 0 and user == USERS[0]
    assert successes(report["outcomes"], user) == (set() if is_root else _NEEDS_LANDLOCK)
    assert report["no_new_privs"] == 1


# Of template folders, archives and asynchronous templates, which the gateway does not use; of
# objects that are loaded with them, and of versions.
_UNUSED = {"asyncio", "gettext", "importlib.metadata", "jinja2.loaders", "logging", "os", "zipfile"}


@pytest.mark.parametrize("package", ["jinja2", "markupsafe"])
def test_templates_find_what_is_imported_late(package: str) -> None:
    """A confined process can import nothing more."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    late = set[str]()
    for path in Path(spec.origin).parent.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                late |= {name for node in ast.walk(function) for name in imported(node, package)}
    program = (
        "import sys, gateway.models.chat_template, gateway.models.step_bodies; print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert late - _UNUSED - set(loaded.stdout.split()) <= set(_LATER)
    assert late & set(_LATER)


def imported(node: ast.AST, package: str) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {f"{package}.{node.module}" if node.level else str(node.module)}
    return set()
