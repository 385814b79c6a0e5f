"""What a function imports at a cold start, and what its snapshot contains.

No times here: bench/RESULTS.md has the figure and how it is measured.
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


def printed(program: str, environ: dict[str, str]) -> Any:
    """The JSON that a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cold() -> Any:
    return printed(START, {})


def test_a_cold_start_imports_only_what_every_call_needs(cold: Any) -> None:
    """Not tokenizers, templates, the Prometheus page or AWS clients."""
    assert "gateway.app" in cold["loaded"]
    assert not sorted(HEAVY.intersection(cold["loaded"]))


def test_a_snapshot_contains_the_imports_of_the_first_call() -> None:
    """Tokenizers and templates are imported before the snapshot is taken."""
    ahead = printed(START, BY_A_SNAPSHOT)
    assert "tokenizers.decoders" in ahead["loaded"]
