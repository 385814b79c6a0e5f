"""The Triton kernels compile for GPUs that this machine lacks: the interpreter accepts code that
they do not."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# That one program may use on every GPU from compute capability 8.0 on; 8.6 and 8.9 have the least.
SHARED_BYTES = 99 * 1024
# Of a thread's registers in the kernel for chunks: on an A100, whose tile has twice the keys of
# later GPUs without wgmma, and where the heads of a group are no power of two. float32, which is no
# default on a GPU, may spill.
MOST_SPILLED_BYTES = {
    (80, "usual"): 40,
    (80, "groups"): 48,
    (80, "sizes"): 40,
    (80, "float16"): 40,
    (120, "groups"): 88,
}
MOST_SPILLED_FLOAT32 = 296
# A type, a head size, and numbers of query and KV heads. The first is compiled plain and with every
# flag.
LAYERS = {
    "usual": ["bfloat16:128:32:8"],
    "groups": [f"bfloat16:128:{heads}" for heads in ("28:4", "64:8", "32:1", "64:1")],
    "sizes": [
        *("bfloat16:64:32:8", "bfloat16:80:32:32", "bfloat16:96:32:32", "bfloat16:128:32:32"),
        "bfloat16:256:8:4",
    ],
    "float16": ["float16:64:32:8", "float16:128:32:8", "float16:256:8:4"],
    "float32": ["float32:64:32:8", "float32:128:32:8", "float32:256:8:4"],
}
# 7.5 compiles none: the kernel for chunks needs 96 KiB, of 64, and auto takes torch's attention.
CAPABILITIES = [80, 86, 89, 90, 120]
IN_CAMPAIGNS = [("usual", 89)]
KERNELS = {
    *("attend_items", "join_parts", "list_parts"),
    *("normalise", "gate_silu", "turn_and_keep"),
    *("find_lowest", "draw_tiles", "join_draws"),
}


def _marks(name: str, capability: int) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.campaign]
    return marks if (name, capability) in IN_CAMPAIGNS else [*marks, pytest.mark.long]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(name, capability, marks=_marks(name, capability))
        for name, capability in itertools.product(LAYERS, CAPABILITIES)
    ],
)
def test_every_kernel_compiles_and_fits(name: str, capability: int, tmp_path: Path) -> None:
    """As the engine launches it, without spilled registers, and once for each kind of layer: sizes
    that change from step to step do not compile a kernel again."""
    layers = LAYERS[name]
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
    most = (
        MOST_SPILLED_FLOAT32 if name == "float32" else MOST_SPILLED_BYTES.get((capability, name), 0)
    )
    for kernel, variants in used.items():
        allowed = most if kernel == "attend_items" else 0
        assert max(spilled for _, spilled in variants) <= allowed, kernel
    # For short spans and for chunks.
    num_layers = len(layers) + sum(layer.endswith(":128:32:8") for layer in layers)
    assert len(used["attend_items"]) == 2 * num_layers
    assert len(used["list_parts"]) == 1
    num_types = len({layer.split(":")[0] for layer in layers})
    assert len(used["find_lowest"]) == num_types
    assert len(used["draw_tiles"]) == 2 * num_types  # with limits and without
    assert len(used["join_draws"]) == 1
