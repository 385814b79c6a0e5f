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


def test_a_snapshot_contains_the_imports_of_the_first_call() -> None:
    """Where nobody waits, tokenizers and templates are there before the first call."""
    ahead = said(START, BY_A_SNAPSHOT)
    assert "tokenizers.decoders" in ahead["loaded"]
