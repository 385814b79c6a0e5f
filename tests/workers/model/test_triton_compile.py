"""The Triton kernels compile for GPUs that this machine lacks: the interpreter accepts code that
they do not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CAPABILITY = 90  # H100
SHARED_BYTES = 227 * 1024  # that one program may use there
HEAD_SIZES = [128, 256]  # plain; with every flag
KERNELS = {"attend_tiles", "join_splits", "normalise", "gate_silu", "turn_and_keep"}


@pytest.mark.campaign
def test_every_kernel_compiles_and_fits(tmp_path: Path) -> None:
    """As the engine launches it, in bfloat16."""
    arguments = [CAPABILITY, *HEAD_SIZES]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}

    ran = subprocess.run(
        [sys.executable, "-m", "tests.workers.model.triton_compile", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
    )

    assert ran.returncode == 0, ran.stderr
    shared_bytes = json.loads(ran.stdout)
    assert set(shared_bytes) == KERNELS
    assert max(max(sizes) for sizes in shared_bytes.values()) <= SHARED_BYTES
