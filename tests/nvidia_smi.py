"""A program nvidia-smi, for machines without a GPU."""

import os
from pathlib import Path

import pytest

from workers.model.nvidia import VISIBLE_VARIABLE

ROWS = (
    "0, GPU-aaaa, NVIDIA A100-SXM4-80GB, 535.104.05, 81920, 40960",
    "1, GPU-bbbb, NVIDIA GB10, 535.104.05, [N/A], [N/A]",  # it shares the CPU's memory
)


def fake_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str, status: int = 0) -> None:
    """Puts a program nvidia-smi on PATH, in `folder`, that prints these lines. The answer is read
    once for each folder."""
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    printed = "".join(f"echo '{line}'\n" for line in lines)
    program.write_text(f"#!/bin/sh\n{printed}exit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv(VISIBLE_VARIABLE, raising=False)
