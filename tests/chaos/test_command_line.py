"""`python -m tests.chaos` as a process: however it ends, it leaves nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.infra.processes import descendants, is_alive, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.campaign]


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A campaign of many faults that has just begun."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", "--faults=1000", "--gap-s=0.1"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            if "fleet is up" in line:
                break
        yield process
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_an_interrupted_campaign_leaves_nothing(
    campaign: subprocess.Popen[str], number: signal.Signals
) -> None:
    """Ctrl-C ends all processes in order. If the campaign is killed, lifelines and reapers end its
    processes."""
    children = descendants(campaign.pid)
    assert len(children) >= 6  # Redis, three workers, two gateways at the least
    campaign.send_signal(number)
    assert campaign.wait(timeout=60) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, children)), timeout_s=60)
