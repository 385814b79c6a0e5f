"""`batchway up` from end to end: it serves, restarts its parts, and leaves nothing behind."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from batchway_client.events import Parser
from tests.fakes import HashModelOptions
from tests.infra.processes import wait_until
from tests.infra.stack import MODEL, Stack, running_stack
from tests.infra.test_cli import run_cli

pytestmark = pytest.mark.e2e

ENDLESS = HashModelOptions(step_s=0.02, eos_rate=0.0)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A running stack for the tests that end nothing but a part."""
    with running_stack("--namespace=apart") as stack:
        yield stack


def names_of(stack: Stack) -> set[str]:
    """The parts whose names begin the lines; the welcome's lines have none."""
    return {line.split("|")[0].strip() for line in stack.lines if " | " in line}


def test_printed_commands_work_and_operators_commands_find_the_stack(stack: Stack) -> None:
    """The welcome has the address, the model and no secret; every other line starts with a
    part's name. Without REDIS_URL, commands use the running stack's Redis, namespace and
    gateway."""
    url = stack.url
    curl = stack.wait_for("curl ")
    stack.wait_for("Ctrl-C ends it.")
    assert f"{url}/v1/chat/completions" in curl
    assert f'"model": "{MODEL}"' in curl
    job_id = stack.complete().headers["x-job-id"]
    temp_dir = {"TMPDIR": str(stack.temp_dir)}
    listed = run_cli("jobs", "list", "--status", "succeeded", **temp_dir)
    assert job_id in listed.stdout, listed.stderr
    shown = run_cli("top", "--json", "-", **temp_dir)
    assert MODEL in shown.stdout, shown.stderr
    refused = run_cli("drain", "--worker", "nope", **temp_dir)
    assert refused.returncode == 1
    assert "there is no worker nope; nothing was changed" in refused.stderr
    redis_url = stack.wait_for("| redis (of our own)").split()[-1]
    assert run_cli("keys", "list", "--redis-url", redis_url).returncode == 0
    assert names_of(stack) == {"batchway", "callbacks", "gateway", "worker-1"}


def test_a_part_that_dies_is_started_again(stack: Stack) -> None:
    """After kill -9 of each part in turn, requests are served at the same address."""
    parts = {"worker-1": "infra worker", "gateway": "infra gateway", "redis": "redis.sock"}
    assert stack.complete().status_code == 200
    for name, part in parts.items():
        killed = stack.pid_of(part)
        os.kill(killed, signal.SIGKILL)
        stack.wait_for(f"{name} ended")
        wait_until(lambda part=part, killed=killed: is_back(stack, part, killed))  # type: ignore[misc]
    assert stack.process.poll() is None


def is_back(stack: Stack, part: str, killed: int) -> bool:
    """Whether requests are served again by a new process."""
    try:
        return stack.complete().status_code == 200 and stack.pid_of(part) != killed
    except (httpx.TransportError, ValueError):
        return False


def test_one_signal_ends_everything_in_order() -> None:
    """A running request gets its whole answer; then gateway, workers and Redis end, with exit
    status 0. Ctrl-C does the same as SIGTERM, see below."""
    with running_stack("--workers=2", model=ENDLESS) as stack:
        stack.wait_for("worker-2 | ")
        request = Stream(stack, max_tokens=50)
        children = stack.children()
        assert stack.end(signal.SIGTERM) == 0
        request.join()
        assert request.num_tokens == 50
        stack.assert_left_nothing(children)
        assert "batchway | everything has ended" in stack.lines
        assert names_of(stack) == {"batchway", "callbacks", "gateway", "worker-1", "worker-2"}


def test_a_key_is_required_and_never_shown() -> None:
    """The printed commands name its variable. The gateway has it, the worker has not. Pages of the
    origin that the option names may call with it."""
    key = "a-key-for-this-test"
    environ = {"BATCHWAY_API_KEY": key, "BATCHWAY_ALLOWED_HOSTS": "api.example.com"}
    origin = "https://app.example.com"
    with running_stack(f"--allowed-origins={origin}", environ=environ) as stack:
        url = stack.url
        assert "$BATCHWAY_API_KEY" in stack.wait_for("curl ")
        headers = {"host": "api.example.com"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 401
        headers |= {"authorization": f"Bearer {key}", "origin": origin}
        answer = httpx.get(f"{url}/v1/models", headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
        assert stack.end() == 0
        assert not any(key in line for line in stack.lines)


@pytest.mark.campaign
def test_children_end_with_a_killed_parent() -> None:
    """kill -9 leaves no gateway, worker, engine, Redis or folder. A worker without Redis tries
    to leave properly until its drain budget ends."""
    with running_stack("--drain-s=5") as stack:
        assert stack.complete().status_code == 200
        children = stack.children()
        assert len(children) >= 5  # gateway, worker, engine, Redis, reaper
        stack.process.kill()
        stack.wait()
        stack.assert_left_nothing(children)


def test_a_second_signal_kills() -> None:
    with running_stack("--max-model-len=512", model=ENDLESS) as stack:
        request = Stream(stack, max_tokens=480)
        children = stack.children()
        stack.process.send_signal(signal.SIGINT)
        stack.wait_for("Ctrl-C again kills")
        assert stack.end() == 130
        request.join()
        assert request.num_tokens < 480
        stack.assert_left_nothing(children)


def test_a_model_that_cannot_be_served_ends_everything() -> None:
    with running_stack(model=HashModelOptions(refuses="the folder holds no model")) as stack:
        assert stack.wait() == 1
        stack.wait_for("the folder holds no model")
        stack.wait_for("batchway | worker-1 cannot run (exit status 3)")
        stack.wait_for("batchway | everything has ended")
        assert not any("Traceback" in line for line in stack.lines)
        stack.assert_left_nothing([])


@pytest.mark.campaign
def test_a_data_directory_keeps_jobs_across_restarts(tmp_path: Path) -> None:
    """One that finished in a run can be read in the next. With the durable profile, Redis writes
    before it answers."""
    kept = (f"--data-dir={tmp_path}", "--drain-s=0")
    with running_stack(*kept) as stack:
        job_id = stack.complete().headers["x-job-id"]
        assert stack.end() == 0
    with running_stack(*kept, "--durability=durable") as stack:
        assert httpx.get(f"{stack.url}/v1/jobs/{job_id}").json()["status"] == "succeeded"
        [path] = stack.temp_dir.glob("batchway-*/redis.sock")
        with redis.Redis(unix_socket_path=str(path), decode_responses=True) as client:
            assert client.config_get("appendfsync") == {"appendfsync": "always"}
        assert stack.end() == 0


def test_each_partition_gets_a_worker(tmp_path: Path) -> None:
    """The namespace keeps its number. Fewer workers than partitions are refused."""
    kept = (f"--data-dir={tmp_path}", "--drain-s=0")
    with running_stack(*kept, "--partitions=2", "--workers=2") as stack:
        assert (
            stack.complete().headers["x-job-id"].startswith("job-1-")
        )  # the partition of its name
        assert httpx.get(f"{stack.url}/readyz").json()["workers"] == {MODEL: 2}
        assert stack.end() == 0
    with running_stack(*kept) as stack:
        assert stack.wait() == 1
        stack.wait_for("2 partitions need as many workers of each model, but 'm' has 1")


class Stream(threading.Thread):
    """A running streamed request; counts the tokens received."""

    def __init__(self, stack: Stack, max_tokens: int) -> None:
        super().__init__()
        self._url = f"{stack.url}/v1/completions"
        self._body: dict[str, Any] = {"model": MODEL, "prompt": "go on", "max_tokens": max_tokens}
        self._body |= {"stream": True, "return_token_ids": True}
        self.num_tokens = 0
        self.start()
        wait_until(lambda: self.num_tokens > 0)

    def run(self) -> None:
        call = httpx.stream("POST", self._url, json=self._body, timeout=60)
        parser = Parser()
        with suppress(httpx.TransportError), call as response:  # the gateway may be killed
            for part in response.iter_bytes():
                for event in parser.feed(part):
                    choices = event.data.get("choices", ())
                    self.num_tokens += sum(len(c.get("token_ids") or ()) for c in choices)
