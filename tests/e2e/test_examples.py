"""The programs in examples/, against one `batchway up`."""

import os
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from standardwebhooks.webhooks import Webhook

from batchway_client import Client, Event
from examples.follow_job import text_of
from tests.infra.stack import Stack

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
SECRET = "whsec_MDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAw"
BODY = b'{"type": "job.succeeded", "timestamp": "2025-01-01T00:00:00Z", "data": {"id": "job-0-1"}}'


def run(name: str, *arguments: str) -> str:
    """Runs an example to its end; returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_jobs_are_submitted_answered_and_deleted(stack: Stack) -> None:
    """Each question is printed with its answer; afterwards no job is stored."""
    printed = run("submit_jobs", stack.url, "Count from 1 to 5.", "Spell the word lantern.")
    assert "Count from 1 to 5.\n  1" in printed
    assert "l" in printed.split("Spell the word lantern.\n")[1]
    with Client(stack.url) as client:
        assert list(client.list(metadata={"program": "submit_jobs"})) == []


def test_a_killed_reader_resumes_its_stream(stack: Stack, tmp_path: Path) -> None:
    """Both processes together print what one reader prints."""
    question = [{"role": "user", "content": "Count from 1 to 100."}]
    body = {"model": "demo", "messages": question, "temperature": 0}
    position = tmp_path / "position"
    with Client(stack.url) as client:
        job = client.submit("/v1/chat/completions", body)
        command = [sys.executable, "-m", "examples.follow_job", stack.url, job.id, str(position)]
        reader = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert reader.stdout is not None
        with reader.stdout:
            first = reader.stdout.read(20)
            reader.kill()
            first += reader.stdout.read()
        reader.wait()
        done = client.wait(job.id)
        longest = longest_step(client.events(job.id))
    rest = run("follow_job", stack.url, job.id, str(position))
    assert done.result is not None
    text = done.result["choices"][0]["message"]["content"]
    assert rest.endswith("\n[succeeded]\n")
    second = rest.removesuffix("\n[succeeded]\n")
    assert text.startswith(first)
    assert text.endswith(second)
    # The last event may be printed twice, because the position is saved after printing. On a busy
    # machine, where workers write seldom, an event has many chunks.
    assert 0 <= len(first + second) - len(text) <= longest


def longest_step(events: Iterable[Event]) -> int:
    """The most characters between two events with ids."""
    steps = [0]
    for event in events:
        steps[-1] += len(text_of(event))
        if event.id is not None:
            steps.append(0)
    return max(steps)


def test_callbacks_are_verified_and_handled_once() -> None:
    """204 for each delivery, one line for each event, 400 for unsigned messages."""
    receiver = subprocess.Popen(
        [sys.executable, "-m", "examples.receive_callbacks", "0"],
        cwd=ROOT,
        env={**os.environ, "CALLBACK_SECRET": SECRET},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert receiver.stdout is not None
        url = f"http://127.0.0.1:{receiver.stdout.readline().split()[-1]}"
        now = datetime.now(UTC)
        headers = {
            "webhook-id": "msg_1",
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": Webhook(SECRET).sign("msg_1", now, BODY.decode()),
        }
        for _ in range(2):
            assert httpx.post(url, content=BODY, headers=headers).status_code == 204
        forged = httpx.post(url, content=BODY.replace(b"0-1", b"0-2"), headers=headers)
        assert forged.status_code == 400
    finally:
        receiver.terminate()
        printed, _ = receiver.communicate(timeout=20)
    assert printed == "msg_1 job.succeeded job-0-1\n"
