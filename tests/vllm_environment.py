"""Where vLLM is installed, for tests that run it; without it they skip."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


VLLM_PYTHON = Path(os.environ.get("BATCHWAY_VLLM", ROOT / ".venv-vllm")) / "bin" / "python"


def vllm_python() -> Path:
    """The interpreter of vLLM's environment. Skips the test where there is none."""
    if not VLLM_PYTHON.exists():
        pytest.skip("vLLM is not installed: scripts/setup-vllm")
    return VLLM_PYTHON


def vllm_arguments() -> tuple[str, ...]:
    """Options of `batchway up` for a vLLM that starts in seconds."""
    return (
        "--engine=vllm",
        f"--engine-python={vllm_python()}",
        "--engine-arg=enforce_eager=true",
        "--dtype=float32",
    )
