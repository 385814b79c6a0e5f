"""What a function loads before it answers: little, where a caller waits; the rest ahead, where not.

No times here: docs/deployment.md has the figure and how it is measured.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BY_A_SNAPSHOT = {"AWS_LAMBDA_INITIALIZATION_TYPE": "snap-start"}
HEAVY = {
    "boto3", "botocore", "httpx", "jinja2", "numpy",
    "prometheus_client", "rq", "tokenizers", "torch", "uvicorn",
}  # fmt: skip

START = """
import json, sys
import gateway.aws.handler
print(json.dumps({"loaded": list(sys.modules)}))
"""


def said(program: str, environ: dict[str, str]) -> Any:
    """The JSON that a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cold() -> Any:
    return said(START, {})


def test_a_cold_start_loads_nothing_that_can_wait(cold: Any) -> None:
    """Tokenizers, templates, pages for Prometheus, clients of AWS: none is needed yet."""
    assert "gateway.http.app" in cold["loaded"]
    assert not sorted(HEAVY.intersection(cold["loaded"]))


def test_what_a_first_call_needs_is_in_the_snapshot() -> None:
    """Where nobody waits, tokenizers and templates are there before the first call."""
    ahead = said(START, BY_A_SNAPSHOT)
    assert "tokenizers.decoders" in ahead["loaded"]


@pytest.mark.parametrize("entry", ["handler", "housekeeper", "web"])
def test_garbage_is_collected_again_before_anybody_is_answered(entry: str) -> None:
    """In every entry point; the two that are modules of functions say so when they are imported."""
    text = (ROOT / "gateway" / "aws" / f"{entry}.py").read_text()
    assert text.count("imports_are_done()") == 1
    if entry in ("handler", "housekeeper"):
        program = "import gc, json; before = gc.get_threshold(); import gateway.aws.%s; "
        told = "print(json.dumps([before, gc.get_threshold()]))"
        before, after = said(program % entry + told, {})
        assert before == after


def test_what_imports_made_is_no_work_for_the_collector() -> None:
    """Nothing is left for its next round, and none was made while they lasted."""
    program = """
import gc, json
rounds = []
gc.callbacks.append(lambda phase, about: rounds.append(phase))
gc.collect()
import gateway.aws.handler
print(json.dumps([len(rounds), len(gc.get_objects()), gc.get_freeze_count()]))
"""
    num_phases, num_left, num_frozen = said(program, {})
    assert num_phases == 2  # of our own round: it began and ended
    assert num_left < 1_000 < num_frozen
