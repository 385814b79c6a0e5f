"""Compares the engine alone with the engine behind HTTP and Redis, on the same requests."""

import json
from pathlib import Path

import pytest

from bench.pipe import main, running_server
from bench.processor_time import CALLERS
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.campaign]


def test_both_are_measured_in_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every round counts all tokens, and every part of the server is reported."""
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")  # unused: it starts its own server
    model, out = save_tiny_model("llama", tmp_path / "llama"), tmp_path / "out.json"
    arguments = ["--model", model, "--dtype", "float32", "--streams", 3, "--prompt-tokens", 8]
    arguments += ["--output-tokens", 6, "--rounds", 2, "--alone", 2, "--json", out]
    assert main([str(argument) for argument in arguments]) == 0
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    assert found["num_tokens"] == 2 * 3 * 6
    assert [len(found[f"{who}_tokens_per_s"]) for who in ("engine", "server")] == [2, 2]
    assert [len(found[f"{who}_ttft_s"]) for who in ("engine", "server", "httpx")] == [2, 2, 2]
    assert {"engine", "worker's supervisor", "gateway", "Redis", CALLERS} <= set(
        found["processor_s"]
    )
    assert found["share"] > 0
    assert f"server of engine, medians: {found['share']:.1%}" in shown


def test_a_server_that_does_not_start_is_an_error() -> None:
    """Not an endless wait."""
    with (
        pytest.raises(RuntimeError, match="before it was ready"),
        running_server(["--dtype=none"]),
    ):
        raise AssertionError("it cannot be ready")
