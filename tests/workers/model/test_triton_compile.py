"""The Triton kernels compile for GPUs that are not here: the interpreter takes what they do not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Compute capability, and the shared memory in bytes that one program may take there: A100, H100.
GPUS = {80: 163 * 1024, 90: 227 * 1024}
# An A100 has less shared memory, so the widest heads are compiled for it, which need the most.
HEAD_SIZES = {80: [256], 90: [64, 128, 256]}
KERNELS = {"attend_tiles", "join_splits", "normalise", "gate_silu", "turn_and_keep"}


@pytest.mark.campaign
@pytest.mark.parametrize("capability", GPUS)
def test_every_kernel_compiles_and_fits(capability: int, tmp_path: Path) -> None:
    """As the engine launches it, in bfloat16."""
    arguments = [capability, *HEAD_SIZES[capability]]
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
    assert max(max(sizes) for sizes in shared_bytes.values()) <= GPUS[capability]
