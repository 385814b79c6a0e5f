"""`batchway up` in places unlike a developer's machine: it serves, or says why in a sentence."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from infra.log_repeats import Repeats
from tests.infra.stack import MODEL, Stack
from tests.streams import whole_stream

pytestmark = pytest.mark.campaign

NOBODY = "http://127.0.0.1:9"  # the port "discard"
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
ENVIRONS: Mapping[str, Mapping[str, str]] = {
    "a locale without UTF-8, another zone and no assertions": {
        "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
        "TZ": "Pacific/Kiritimati", "PYTHONOPTIMIZE": "2",
    },
    "proxies that are gone, and an unknown zone": {
        "TZ": "Nowhere/Atall", "HOME": "/proc/nowhere", "PYTHONDONTWRITEBYTECODE": "1",
        **dict.fromkeys([*PROXIES, *map(str.upper, PROXIES)], NOBODY),
    },
}  # fmt: skip
# Programs that start another one in a place.
PREFIXES: Mapping[str, Sequence[str]] = {
    "few descriptors, one core, a closed input and private files": (
        "sh", "-c", 'ulimit -n 256; umask 077; exec "$@" <&-', "sh",
    ),
    "no output and no home": ("sh", "-c", 'unset HOME; exec "$@" >&-', "sh"),
}  # fmt: skip
HASH_MODEL = ("--engine-module=tests.hash_engine", "--model=hash", f"--served-model-name={MODEL}")


def assert_serves(stack: Stack) -> None:
    """A call is answered, and nothing is wrong in the log."""
    assert_answers(stack)
    assert [line for line in stack.lines if "Traceback" in line or "WARN" in line] == []


def assert_answers(stack: Stack) -> None:
    """A call is answered, and its stream has the same text."""
    url = stack.url
    body = {"model": MODEL, "prompt": "größer als 日本 😀", "max_tokens": 8, "temperature": 0}
    with httpx.Client(trust_env=False, timeout=60) as http:
        whole = http.post(f"{url}/v1/completions", json=body)
        assert whole.status_code == 200, whole.text
        streamed = http.post(f"{url}/v1/completions", json=body | {"stream": True}).text
    pieces = [event.data["choices"][0]["text"] for event in whole_stream(streamed)]
    assert "".join(pieces) == whole.json()["choices"][0]["text"]


def assert_outlives_many_connections(stack: Stack) -> None:
    """More clients than descriptors: those that are connected go on, the log says it once, and
    afterwards others can connect."""
    url = urlsplit(stack.url)
    assert url.hostname is not None
    with httpx.Client(base_url=stack.url, trust_env=False, timeout=60) as connected:
        assert connected.get("/livez").status_code == 200
        with contextlib.ExitStack() as clients:
            for _ in range(300):
                clients.enter_context(socket.create_connection((url.hostname, url.port)))
            line = stack.wait_for("Too many open files")
            assert line.endswith(
                "socket.accept() out of system resource: [Errno 24] Too many open files"
            )
            for _ in range(20):
                assert connected.get("/readyz").status_code == 200
    assert_answers(stack)
    assert len([line for line in stack.lines if "Too many open files" in line]) == 1
    assert [line for line in stack.lines if "Traceback" in line] == []


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a name in which some programs get lost."""
    folder = tmp_path_factory.mktemp("x") / "ä b%41'$c"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("place", ENVIRONS)
def test_an_environment_changes_no_answer(place: str, tmp_path: Path) -> None:
    """Variables that other programs set; also those that an operator's command finds."""
    stack = Stack(tmp_path, HASH_MODEL, ENVIRONS[place])
    try:
        assert_serves(stack)
        top = [sys.executable, "-m", "infra", "top", "--once", f"--url={stack.url}"]
        environ = {**os.environ, **ENVIRONS[place]}
        shown = subprocess.run(top, env=environ, capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        assert stack.end() == 0
    finally:
        stack.close()


def test_paths_may_contain_any_character(short: Path) -> None:
    """Blanks, letters beyond ASCII, and what means something in a URL or a shell: of the socket of
    Redis, its data, the object store, the home and the working directory."""
    names = [f"--data-dir={short}/data", f"--object-store={short}/objects"]
    temp_dir = short / "tmp"
    temp_dir.mkdir()
    stack = Stack(temp_dir, [*HASH_MODEL, *names], {"HOME": str(short)})
    try:
        assert_serves(stack)
        assert (short / "data" / "appendonlydir").exists()
        assert stack.end() == 0
        assert list(temp_dir.iterdir()) == []
    finally:
        stack.close()


@pytest.mark.parametrize("place", PREFIXES)
def test_limits_and_closed_files_change_no_answer(place: str, tmp_path: Path) -> None:
    """What a supervisor of processes may leave out."""
    per_address = {"BATCHWAY_MAX_CONNECTIONS_PER_ADDRESS": "0"}
    stack = Stack(tmp_path, [*HASH_MODEL, "--host=::1"], per_address, prefix=PREFIXES[place])
    try:
        if "output" not in place:
            assert stack.url.startswith("http://[::1]:")
            assert_serves(stack)
            assert_outlives_many_connections(stack)
        else:
            stack.wait_for("listening on ::1 port")
        assert stack.end() == 0
    finally:
        stack.close()


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        (("sh", "-c", 'ulimit -n 16; exec "$@"', "sh"), "open file"),
        (
            (
                *("unshare", "--mount", "sh", "-c"),
                'for d in /tmp /var/tmp /usr/tmp "$PWD" /dev/shm; do test -d "$d" && '
                'mount --bind "$d" "$d" && mount -o remount,bind,ro "$d"; done; exec "$@"',
                "sh",
            ),
            "No usable temporary directory",
        ),
    ],
)
def test_a_place_in_which_nothing_can_run_is_named(prefix: Sequence[str], reason: str) -> None:
    """In one sentence, with an exit status other than 0."""
    if prefix[0] == "unshare" and subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("mounting a file system needs a privilege")
    command = [*prefix, sys.executable, "-m", "infra", "up", "--port=0", *HASH_MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_a_lasting_state_is_logged_once_a_minute() -> None:
    """Each text by itself; news that are no warnings always pass."""
    now_s = 0.0
    repeats = Repeats(lambda: now_s)

    def passes(level: int, text: str) -> bool:
        return repeats.filter(logging.LogRecord("x", level, "", 0, "%s", (text,), None))

    assert passes(logging.WARNING, "down")
    assert [passes(logging.WARNING, "down") for _ in range(100)] == [False] * 100
    assert passes(logging.WARNING, "full")
    assert passes(logging.INFO, "back")
    assert passes(logging.INFO, "back")
    now_s = 61.0
    assert passes(logging.WARNING, "down")
    assert not passes(logging.WARNING, "down")
