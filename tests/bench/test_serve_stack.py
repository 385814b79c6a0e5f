"""`batchway bench serve` on a real gateway, Redis and worker: its sums are the server's metrics."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.cli import main
from tests.fakes import HashModelOptions
from tests.infra.processes import wait_until
from tests.infra.stack import Stack, running_stack

pytestmark = pytest.mark.e2e

SLOW = HashModelOptions(step_s=0.01, num_blocks=256)


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
    page = httpx.get(f"{stack.url}/metrics", timeout=20).text
    total = 0.0
    for line in page.splitlines():
        found = re.match(rf"batchway_{name}{{(.*)}} (\S+)$", line)
        if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
            total += float(found[2])
    return int(total)


def test_sums_are_the_servers_metrics(tmp_path: Path) -> None:
    """Admitted, shed, ended and cancelled calls; tokens of prompts and answers."""
    bound = {"BATCHWAY_LANE_BOUND_TOKENS": "150"}
    with running_stack("--max-num-seqs=4", model=SLOW, environ=bound) as stack:
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


def test_disconnected_callers_are_the_server_s_cancelled_jobs(tmp_path: Path) -> None:
    """Unless a job ended before the server noticed the disconnect."""
    with running_stack(model=SLOW) as stack:
        summary, _ = serve(
            stack, tmp_path, "--requests=30", "--max-concurrency=5", "--cancel-share=0.4"
        )

        [found] = summary["runs"]
        assert found["num_cancelled"] > 3
        assert found["num_succeeded"] + found["num_cancelled"] == 30
        wait_until(lambda: counted(stack, "requests_total") == 30)
        succeeded = counted(stack, "requests_total", status="succeeded")
        cancelled = counted(stack, "requests_total", status="cancelled")
        assert succeeded + cancelled == 30
        assert found["num_succeeded"] <= succeeded < 30


def test_a_server_without_an_answer_ends_the_command_with_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If nothing listens, and if a key is missing."""
    assert main(["bench", "serve", "--base-url=http://127.0.0.1:1/v1"]) == 1
    assert "does not answer: ConnectError" in capsys.readouterr().err
    with running_stack(environ={"BATCHWAY_API_KEY": "a-key-for-this-test"}) as stack:
        assert main(["bench", "serve", f"--base-url={stack.url}/v1"]) == 1
    assert "answers 401: set BATCHWAY_API_KEY" in capsys.readouterr().err
