"""`batchway bench serve` on a real gateway, Redis and worker: its sums are the server's metrics."""

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.cli import main
from tests.fakes import HashModelOptions
from tests.infra.processes import wait_until
from tests.infra.stack import Stack, running_stack
from tests.telemetry.test_exactness import summed
from tests.telemetry.test_metrics import samples

pytestmark = pytest.mark.e2e

SLOW = HashModelOptions(step_s=0.01, num_blocks=256)


KEY = "a-key-for-these-tests"


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    """One server for all tests, which asks for a key."""
    environ = {"BATCHWAY_LANE_BOUND_TOKENS": "150", "BATCHWAY_API_KEY": KEY}
    with running_stack("--max-num-seqs=4", model=SLOW, environ=environ) as stack:
        yield stack


@pytest.fixture
def stack(running: Stack, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """The server, whose key the command knows."""
    monkeypatch.setenv("BATCHWAY_API_KEY", KEY)
    return running


def serve(stack: Stack, folder: Path, *arguments: str) -> tuple[dict[str, Any], list[Any]]:
    """The JSON report and the rows of the CSV."""
    result, lines = folder / "out.json", folder / "out.csv"
    drawn = ("--prompt-tokens=4:20", "--output-tokens=8:24", "--warm-up=0")
    outputs = (f"--json={result}", f"--csv={lines}", f"--png={folder / 'out.png'}")
    url = f"--base-url={stack.url}/v1"
    assert main(["bench", "serve", url, *drawn, *outputs, *arguments]) == 0
    with lines.open() as file:
        return json.loads(result.read_text()), list(csv.DictReader(file))


def counted(stack: Stack, name: str, **labels: str) -> int:
    """The sum of a counter's series with these labels, from the gateway's /metrics."""
    headers = {"Authorization": f"Bearer {KEY}"}
    page = httpx.get(f"{stack.url}/metrics", headers=headers, timeout=20).text
    return int(summed(samples(page), name, **labels))


def test_sums_are_the_servers_metrics(stack: Stack, tmp_path: Path) -> None:
    """Admitted, shed, ended and cancelled calls; tokens of prompts and answers."""
    summary, lines = serve(stack, tmp_path, "--rate", "20", "500", "--requests=40")

    slow, flooded = summary["runs"]
    assert flooded["num_shed"] > 0
    total = {name: slow[name] + flooded[name] for name in slow if name.startswith("num_")}
    assert total["num_requests"] == len(lines) == 80
    assert total["num_failed"] == total["num_cancelled"] == 0
    assert total["num_succeeded"] == counted(stack, "admission_total", outcome="accepted")
    assert total["num_shed"] == counted(
        stack, "admission_total", outcome="refused", reason="lane_full"
    )
    assert total["num_succeeded"] == counted(stack, "requests_total", status="succeeded")
    for ours, theirs in (("output", "generation"), ("prompt", "prompt")):
        tokens = slow[f"{ours}_tokens"] + flooded[f"{ours}_tokens"]
        assert tokens == counted(stack, f"{theirs}_tokens_total")
    assert sum(int(line["output_tokens"]) for line in lines) == counted(
        stack, "generation_tokens_total"
    )
    assert flooded["reasons"] == {"shed: lane_full": flooded["num_shed"]}


def test_disconnected_callers_are_the_server_s_cancelled_jobs(stack: Stack, tmp_path: Path) -> None:
    """Unless a job ended before the server noticed the disconnect. As few callers as the lane has
    room for."""
    before = ended(stack)

    summary, _ = serve(
        stack, tmp_path, "--requests=30", "--max-concurrency=3", "--cancel-share=0.4"
    )

    [found] = summary["runs"]
    assert found["num_cancelled"] > 3
    assert found["num_succeeded"] + found["num_cancelled"] == 30
    wait_until(lambda: sum((ended(stack) - before).values()) == 30)
    by_status = ended(stack) - before
    assert by_status["succeeded"] + by_status["cancelled"] == 30
    assert found["num_succeeded"] <= by_status["succeeded"] < 30


def ended(stack: Stack) -> Counter[str]:
    """All ended calls so far, by status."""
    by_status = {s: counted(stack, "requests_total", status=s) for s in ("succeeded", "cancelled")}
    others = counted(stack, "requests_total") - sum(by_status.values())
    return Counter(by_status | {"others": others})


def test_a_server_without_an_answer_ends_the_command_with_one_sentence(
    running: Stack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nothing listens, and if a key is missing."""
    monkeypatch.delenv("BATCHWAY_API_KEY", raising=False)
    assert main(["bench", "serve", "--base-url=http://127.0.0.1:1/v1"]) == 1
    assert "does not answer: ConnectError" in capsys.readouterr().err
    assert main(["bench", "serve", f"--base-url={running.url}/v1"]) == 1
    assert "answers 401: set BATCHWAY_API_KEY" in capsys.readouterr().err
