"""The recipes of docs/deployment.md for one machine, run as they are written: after an upgrade, and
on another machine after a backup, nothing is lost.

A real server of Redis and a `batchway up` beside it stand for the containers or units. What the
recipes' lines do with these is done here; each `tar` is run.
"""

import re
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml  # type: ignore[import-untyped]

from infra.embedded_redis import find_server
from tests.fakes import HashModelOptions
from tests.infra.processes import wait_until
from tests.infra.stack import MODEL, Stack, running_stack
from tests.infra.test_cli import run_cli
from tests.markdown import code_blocks

pytestmark = [pytest.mark.e2e, pytest.mark.campaign]

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("docker", pytest.param("systemctl", marks=pytest.mark.long))
SLOW = HashModelOptions(step_s=0.05, eos_rate=0.0)
NUM_TOKENS = 80


def recipe(kind: str, title: str) -> list[list[str]]:
    """The commands below a comment of the block that uses this program."""
    blocks = code_blocks((ROOT / "docs" / "deployment.md").read_text())
    [text] = [
        each.text for each in blocks if "# back up" in each.text and f"\n{kind} " in each.text
    ]
    [part] = re.findall(rf"^# {title}.*\n((?:[^#].*\n?)+)", text, re.MULTILINE)
    return [shlex.split(line) for line in part.splitlines()]


class Machine:
    """Redis' folder and that of the objects, below the place of /var/lib."""

    def __init__(self, var_lib: Path, home: Path) -> None:
        self.redis = var_lib / "redis"
        self.objects = var_lib / "batchway" / "objects"
        self._places = {
            "/var/lib": str(var_lib),
            "/root": str(home),
            "/backup": str(home),
            "batchway_redis": str(self.redis),
            "batchway_objects": str(self.objects),
        }
        self._home, self.socket = home, home / "s"
        self._running = ExitStack()
        self._up: Stack | None = None
        var_lib.mkdir()

    @property
    def url(self) -> str:
        assert self._up is not None
        return self._up.url

    def follow(self, commands: list[list[str]]) -> None:
        """Does what a recipe says."""
        for words in commands:
            match words:
                case ["docker", "compose", "stop"] | ["systemctl", "stop", "batchway-*", _]:
                    self.stop()
                case ["docker", "compose", "start"] | ["systemctl", "start", "redis-server", *_]:
                    self.start()
                case ["docker", "compose", "up", *_] | ["systemctl", "restart", *_]:
                    self.restart()
                case ["docker", "compose", "create"]:
                    self._make_folders()
                case ["git", "pull"] | ["docker", "compose", "build"] | ["scripts/setup", *_]:
                    pass
                case ["docker", "run", "--rm", "-v", data, "-v", backup, "busybox", *command]:
                    source, _, target = data.partition(":")
                    assert backup == "$PWD:/backup"
                    self._run(command, self._places | {target: self._places[source]})
                case ["tar", *_]:
                    self._run(words, self._places)
                case ["docker", "compose", "exec", "-T", "redis", "valkey-cli", "--rdb", "-", _]:
                    assert words[-1] == ">redis.rdb"
                    self._dump(self._home / "redis.rdb")
                case ["redis-cli", "--rdb", "/root/redis.rdb"]:
                    self._dump(self._home / "redis.rdb")
                case ["install", "-D", "-o", "redis", "-g", "redis", *files]:
                    self._run(["install", "-D", *files], self._places)
                case _:
                    raise AssertionError(words)

    def start(self) -> None:
        self._make_folders()
        compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
        [_, *options] = compose["services"]["redis"]["command"]
        options = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", option) for option in options]
        where = ["--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.redis)]
        server = subprocess.Popen(
            [find_server(), *options, *where],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._running.callback(_end, server)
        wait_until(lambda: _answers(self.socket))
        self._up = self._running.enter_context(self._batchway())

    def stop(self) -> None:
        """The parts hand their jobs back, then Redis ends."""
        self._up = None
        self._running.close()

    def restart(self) -> None:
        """All parts but Redis."""
        assert self._up is not None
        self._up.end(signal.SIGTERM)
        self._up = self._running.enter_context(self._batchway())

    def _batchway(self) -> Any:
        return running_stack(
            f"--redis-url=unix://{self.socket}",
            f"--object-store={self.objects}",
            "--drain-s=0.5",
            model=SLOW,
            environ={"BATCHWAY_OBJECT_MIN_BYTES": "1"},
        )

    def _make_folders(self) -> None:
        for folder in (self.redis, self.objects):
            folder.mkdir(parents=True, exist_ok=True)

    def _run(self, words: list[str], places: dict[str, str]) -> None:
        mapped = [
            re.sub(r"^(/data|/var/lib|/root|/backup)(?=/|$)", lambda found: places[found[1]], word)
            for word in words
        ]
        status = subprocess.run(mapped, cwd=self._home).returncode
        went_away = 1 if words[0] == "tar" and self._up is not None else 0  # a file, as tar read it
        assert status in (0, went_away)

    def _dump(self, path: Path) -> None:
        """What `redis-cli --rdb` does: it asks for what a replica gets first."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.socket))
            with connection.makefile("rwb") as stream:
                for line in (b"REPLCONF rdb-only 1\r\n", b"SYNC\r\n"):
                    stream.write(line)
                    stream.flush()
                    answer = stream.readline()
                while answer == b"\n":  # the server keeps the connection alive
                    answer = stream.readline()
                if not answer.startswith(b"$EOF:"):
                    path.write_bytes(stream.read(int(answer[1:])))
                    return
                end, content = answer[5:].strip(), b""
                while not content.endswith(end):
                    content += stream.read1()
                path.write_bytes(content.removesuffix(end))


def _answers(server: Path) -> bool:
    with suppress(redis.RedisError), redis.Redis(unix_socket_path=str(server)) as client:
        return bool(client.ping())
    return False


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    server.wait(timeout=30)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines with one backup folder; the sockets' paths are short."""
    with tempfile.TemporaryDirectory(prefix="bw-", dir="/tmp") as home:
        machines = tuple(Machine(tmp_path / name, Path(home)) for name in ("old", "new"))
        yield machines  # type: ignore[misc]
        for machine in machines:
            machine.stop()


def ask(url: str, prompt: str, num_tokens: int = NUM_TOKENS) -> str:
    """Queues a job; returns its id."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "seed": 1}
    answer = httpx.post(f"{url}/v1/jobs", json={"endpoint": "/v1/completions", "body": body})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def job(url: str, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/v1/jobs/{job_id}", timeout=30).json()
    return found


def text_of(url: str, job_id: str) -> str:
    """A job's text, once it has ended."""
    wait_until(lambda: job(url, job_id)["status"] == "succeeded")
    return str(job(url, job_id)["result"]["choices"][0]["text"])


def has_begun(url: str, job_id: str) -> bool:
    """Whether a job has output, which it will go on after."""
    return bool(job(url, job_id)["status"] == "running")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_by_an_upgrade_and_a_move(
    kind: str, places: tuple[Machine, Machine]
) -> None:
    """An ended job, one that runs, a file and its batch: on the new machine all are there, go on,
    and have the texts of an undisturbed run."""
    old, new = places
    old.start()
    ended = ask(old.url, "ended")
    expected = text_of(old.url, ended)
    lines = b"".join(
        b'{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": '
        b'{"model": "%s", "prompt": "line", "max_tokens": 30}}\n' % (number, MODEL.encode())
        for number in range(10)
    )
    form = {"file": ("in.jsonl", lines)}
    file_id = httpx.post(f"{old.url}/v1/files", files=form, data={"purpose": "batch"}).json()["id"]

    upgraded = ask(old.url, "ended")
    wait_until(lambda: has_begun(old.url, upgraded))
    old.follow(recipe(kind, "upgrade"))
    assert text_of(old.url, upgraded) == expected

    asked = {
        "input_file_id": file_id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch_id = httpx.post(f"{old.url}/v1/batches", json=asked).json()["id"]
    running = ask(old.url, "ended")
    wait_until(lambda: has_begun(old.url, running))
    old.follow(recipe(kind, "back up"))
    later = ask(old.url, "after the copy")
    old.stop()

    new.follow(recipe(kind, "restore"))
    assert text_of(new.url, ended) == text_of(new.url, running) == expected
    assert httpx.get(f"{new.url}/v1/files/{file_id}/content").content == lines

    def batch() -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{new.url}/v1/batches/{batch_id}").json()
        return found

    wait_until(lambda: batch()["status"] == "completed", timeout_s=120)
    assert batch()["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
    output = httpx.get(f"{new.url}/v1/files/{batch()['output_file_id']}/content").text
    assert len(output.splitlines()) == 10
    assert httpx.get(f"{new.url}/v1/jobs/{later}").status_code == 404


# --- a copy while all runs ---------------------------------------------------------------------

LENGTHS = (5, 15, 80)  # tokens, by the number of a prompt
NUM_CALLERS = 3


class Load:
    """Callers that queue jobs one after another, and delete some that have ended."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self.acknowledged: dict[str, int] = {}  # ids in order, and the prompts' numbers
        self.deleted: set[str] = set()

    def queue(self, number: int) -> str:
        job_id = ask(self._url, f"prompt {number}", LENGTHS[number])
        self.acknowledged[job_id] = number
        return job_id

    def call(self, number: int) -> None:
        while not self._is_over.wait(0.1):
            self.queue(number)
            old = next(iter(self.acknowledged))
            if number == 0 and job(self._url, old).get("status") == "succeeded":
                self.deleted.add(old)
                self.acknowledged.pop(old)
                assert httpx.delete(f"{self._url}/v1/jobs/{old}").status_code in (200, 204)

    def go_on(self, num_more: int) -> None:
        """Waits for so many calls and some deletions more."""
        num_made, num_deleted = len(self.acknowledged), len(self.deleted)
        wait_until(
            lambda: (
                len(self.acknowledged) > num_made + num_more and len(self.deleted) > num_deleted + 1
            )
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(NUM_CALLERS) as callers:
            calls = [callers.submit(self.call, number) for number in range(NUM_CALLERS)]
            try:
                yield
            finally:
                self._is_over.set()
            for call in calls:
                call.result()


@pytest.mark.long  # the test above shows the same of a copy that stands still
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_under_load_has_all_that_was_acknowledged_before_it(
    kind: str, places: tuple[Machine, Machine]
) -> None:
    """Running and ended jobs: on the new machine all end, with the texts of undisturbed
    runs. Nothing is there by halves: counters and lists are as the records say."""
    old, new = places
    old.start()
    expected = [
        text_of(old.url, ask(old.url, f"prompt {number}", length))
        for number, length in enumerate(LENGTHS)
    ]
    load = Load(old.url)
    with load.running():
        load.go_on(15)
        last = load.queue(2)
        before = dict(load.acknowledged)
        assert job(old.url, last)["status"] in ("queued", "running")
        for command in recipe(kind, "copy while all runs"):
            old.follow([command])
            load.go_on(5)
    old.stop()

    new.follow(recipe(kind, "use a copy"))
    for job_id, number in before.items():
        if job_id not in load.deleted:
            assert text_of(new.url, job_id) == expected[number]
    later = load.acknowledged.keys() - before.keys()
    copied = [one for one in later if httpx.get(f"{new.url}/v1/jobs/{one}").status_code == 200]
    for job_id in copied:
        assert text_of(new.url, job_id) == expected[load.acknowledged[job_id]]
    assert len(copied) < len(later)
    checked = run_cli("check", f"--redis-url=unix://{new.socket}")
    assert checked.returncode == 0, checked.stdout + checked.stderr
