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
    "boto3", "botocore", "gateway.http.openapi", "httpx", "jinja2", "numpy",
    "prometheus_client", "pydantic.v1", "rq", "tokenizers", "torch", "uvicorn",
}  # fmt: skip

# As in the artifact, which does not have pydantic.v1.
START = """
import json, sys
sys.modules["pydantic.v1"] = None
import gateway.aws.handler
from pydantic import BaseModel

def models(of):
    for model in of.__subclasses__():
        yield model
        yield from models(model)

built = [m.__module__ for m in models(BaseModel) if m.__pydantic_complete__]
loaded = [name for name, module in sys.modules.items() if module is not None]
print(json.dumps({"loaded": loaded, "built": built}))
"""


DOCUMENT = """
import json
from gateway.http.app import create_app
from gateway.settings import GatewaySettings

print(json.dumps(create_app(GatewaySettings(redis_url="redis://127.0.0.1:1")).openapi()))
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


def test_a_cold_start_builds_no_model_of_ours(cold: Any) -> None:
    """Bodies are built by the first of their kind; FastAPI itself asks for a few of its own."""
    assert not [module for module in cold["built"] if module.startswith("gateway")]
    assert len(cold["built"]) < 10


def test_what_a_first_call_needs_is_in_the_snapshot() -> None:
    """Where nobody waits, tokenizers, templates and bodies are there before the first call."""
    ahead = said(START, BY_A_SNAPSHOT)
    assert "tokenizers.decoders" in ahead["loaded"]
    assert ahead["built"].count("gateway.openai.schemas") >= 4


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


def test_models_that_are_built_late_say_the_same() -> None:
    """The OpenAPI document, which comes of most of them, is that of a server."""
    assert said("import gateway.aws" + DOCUMENT, {}) == said(DOCUMENT, {})


def test_the_artifact_is_built_without_what_only_refuses_old_models() -> None:
    """pydantic.v1, which FastAPI would load to see that nobody uses it."""
    assert 'rm -rf "$target/pydantic/v1"' in (ROOT / "scripts" / "build-gateway").read_text()
