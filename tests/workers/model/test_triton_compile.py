"""The Triton kernels compile for GPUs that this machine lacks: the interpreter accepts code that
they do not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# That one program may use on every GPU from compute capability 8.0 on; 8.6 and 8.9 have the least.
SHARED_BYTES = 99 * 1024
# A type and a head size. 128 is compiled plain and with every flag.
USUAL = ["bfloat16:128"]
OTHERS = [
    *(f"bfloat16:{dim}" for dim in (64, 256)),
    *(f"float16:{dim}" for dim in (64, 128, 256)),
    *(f"float32:{dim}" for dim in (64, 128, 256)),
]
KERNELS = {
    *("attend_items", "join_parts", "list_parts"),
    *("normalise", "gate_silu", "turn_and_keep"),
    *("find_lowest", "draw_tiles", "join_draws"),
}


@pytest.mark.parametrize(
    "heads", [USUAL, pytest.param(OTHERS, marks=pytest.mark.campaign)], ids=["usual", "others"]
)
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles_and_fits(capability: int, heads: list[str], tmp_path: Path) -> None:
    """As the engine launches it, and once for each kind of layer: sizes that change from step to
    step do not compile a kernel again."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}

    ran = subprocess.run(
        [sys.executable, "-m", "tests.workers.model.triton_compile", str(capability), *heads],
        env=environment,
        capture_output=True,
        text=True,
    )

    assert ran.returncode == 0, ran.stderr
    shared_bytes = json.loads(ran.stdout)
    assert set(shared_bytes) == KERNELS
    assert max(max(sizes) for sizes in shared_bytes.values()) <= SHARED_BYTES
    # For short spans and for chunks.
    num_layers = len(heads) + sum(head.endswith(":128") for head in heads)
    assert len(shared_bytes["attend_items"]) == 2 * num_layers
    assert len(shared_bytes["list_parts"]) == 1
    num_types = len({head.split(":")[0] for head in heads})
    assert len(shared_bytes["find_lowest"]) == num_types
    assert len(shared_bytes["draw_tiles"]) == 2 * num_types  # with limits and without
    assert len(shared_bytes["join_draws"]) == 1
