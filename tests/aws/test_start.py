"""What a function imports at a cold start, and what its snapshot contains.

No times here: bench/RESULTS.md has the figure and how it is measured.
"""

import json
import subprocess
import sys
from pathlib import Path

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
print(json.dumps(list(sys.modules)))
"""


@pytest.mark.parametrize("environ", [{}, BY_A_SNAPSHOT], ids=["cold", "snapshot"])
def test_what_is_imported_before_the_first_call(environ: dict[str, str]) -> None:
    """At a cold start neither tokenizers and templates nor the Prometheus page or AWS clients; the
    former before a snapshot is taken."""
    done = subprocess.run(
        [sys.executable, "-c", START], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert "gateway.app" in loaded
    assert ("tokenizers.decoders" in loaded) == bool(environ)
    assert environ or not HEAVY & loaded
