"""The Triton kernels compile for GPUs that this machine lacks: the interpreter accepts code that
they do not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

# That one program may use on every GPU from compute capability 8.0 on; 8.6 and 8.9 have the least.
SHARED_BYTES = 99 * 1024
# Of a thread's registers in the kernel for chunks, on GPUs that multiply without wgmma (8.x): a
# tenth of its numbers. Tiles with half the keys would spill none, but are small for later GPUs.
# float32, which is no default on a GPU, may spill a few.
MOST_SPILLED_BYTES = {80: 96, 90: 0}
MOST_SPILLED_FLOAT32 = 16
# A type, a head size, and numbers of query and KV heads. The first is compiled plain and with every
# flag.
LAYERS = {
    "usual": ["bfloat16:128:32:8", "bfloat16:128:32:32"],
    "groups": [f"bfloat16:128:{heads}" for heads in ("28:4", "64:8", "32:1", "64:1")],
    "sizes": ["bfloat16:64:32:8", "bfloat16:80:32:32", "bfloat16:96:32:32", "bfloat16:256:8:4"],
    "float16": ["float16:64:32:8", "float16:128:32:8", "float16:256:8:4"],
    "float32": ["float32:64:32:8", "float32:128:32:8", "float32:256:8:4"],
}
MARKS: dict[str, Any] = {"usual": (), "sizes": pytest.mark.campaign}
KERNELS = {
    *("attend_items", "join_parts", "list_parts"),
    *("normalise", "gate_silu", "turn_and_keep"),
    *("find_lowest", "draw_tiles", "join_draws"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(
            layers, id=name, marks=MARKS.get(name, [pytest.mark.campaign, pytest.mark.long])
        )
        for name, layers in LAYERS.items()
    ],
)
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles_and_fits(capability: int, layers: list[str], tmp_path: Path) -> None:
    """As the engine launches it, without spilled registers, and once for each kind of layer: sizes
    that change from step to step do not compile a kernel again."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}

    ran = subprocess.run(
        [sys.executable, "-m", "tests.workers.model.triton_compile", str(capability), *layers],
        env=environment,
        capture_output=True,
        text=True,
    )

    assert ran.returncode == 0, ran.stderr
    used = json.loads(ran.stdout)
    assert set(used) == KERNELS
    assert max(shared for variants in used.values() for shared, _ in variants) <= SHARED_BYTES
    for name, variants in used.items():
        most = 0
        if name == "attend_items":
            is_float32 = layers[0].startswith("float32")
            most = MOST_SPILLED_FLOAT32 if is_float32 else MOST_SPILLED_BYTES[capability]
        assert max(spilled for _, spilled in variants) <= most, name
    # For short spans and for chunks.
    num_layers = len(layers) + sum(layer.endswith(":128:32:8") for layer in layers)
    assert len(used["attend_items"]) == 2 * num_layers
    assert len(used["list_parts"]) == 1
    num_types = len({layer.split(":")[0] for layer in layers})
    assert len(used["find_lowest"]) == num_types
    assert len(used["draw_tiles"]) == 2 * num_types  # with limits and without
    assert len(used["join_draws"]) == 1
