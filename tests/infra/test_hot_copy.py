"""The recipe of docs/deployment.md for a copy while all runs: under load, and used elsewhere."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.infra.processes import wait_until
from tests.infra.test_one_machine import KINDS, Machine, ask, job, places, recipe, text_of

__all__ = ["places"]
# test_one_machine.py shows the same of a copy that stands still.
pytestmark = [pytest.mark.e2e, pytest.mark.campaign, pytest.mark.long]

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
    checked = subprocess.run(
        [sys.executable, "-m", "infra", "check", f"--redis-url=unix://{new.socket}"],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
