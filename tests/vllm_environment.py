"""The environment where vLLM is installed, for tests that run it; without it they are skipped."""

import os
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parents[1]


Release = Literal["newest", "oldest"]  # of the supported ones
_SETUP: dict[Release, tuple[str, str, str]] = {
    "newest": ("BATCHWAY_VLLM", ".venv-vllm", "scripts/setup-vllm"),
    "oldest": ("BATCHWAY_VLLM_OLDEST", ".venv-vllm-oldest", "scripts/setup-vllm oldest"),
}


def interpreter(release: Release = "newest") -> Path:
    """The interpreter of vLLM's environment, whether or not it is there."""
    variable, folder, _ = _SETUP[release]
    return Path(os.environ.get(variable, ROOT / folder)) / "bin" / "python"


def vllm_python(release: Release = "newest") -> Path:
    """The interpreter of vLLM's environment. Skips the test if there is none."""
    python = interpreter(release)
    if not python.exists():
        pytest.skip(f"vLLM is not installed: {_SETUP[release][2]}")
    return python


def vllm_arguments() -> tuple[str, ...]:
    """Options of `batchway up` for a vLLM that starts in seconds."""
    return (
        "--engine=vllm",
        f"--engine-python={vllm_python()}",
        "--engine-arg=enforce_eager=true",
        "--dtype=float32",
    )
