"""What devices and engines can do, as `batchway plan` takes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp8", "bfloat16", "float16", "float32"]
ITEM_BYTES: Mapping[Precision, int] = {"fp8": 1, "bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU by its maker's data sheet: memory in bytes, its bandwidth in bytes/s, and dense
    floating-point operations/s, 2 per multiplication, by precision."""

    memory_bytes: float
    bytes_per_s: float
    flops_per_s: Mapping[Precision, float]


def _device(gigabytes: float, gb_per_s: float, half: float, fp8: float = 0.0) -> GpuSpec:
    """`half`, `fp8`: tera-operations/s; 0: the device has no fp8."""
    flops: dict[Precision, float] = {"bfloat16": half * 1e12, "float16": half * 1e12}
    if fp8:
        flops["fp8"] = fp8 * 1e12
    return GpuSpec(gigabytes * 1e9, gb_per_s * 1e9, flops)


# NVIDIA's data sheets. A T4 computes no bfloat16.
DEVICES: Mapping[str, GpuSpec] = {
    "t4": GpuSpec(16e9, 300e9, {"float16": 65e12}),
    "a10g": _device(24, 600, 70),
    "l4": _device(24, 300, 121, 242),
    "rtx4090": _device(24, 1008, 165, 330),
    "l40s": _device(48, 864, 362, 733),
    "a100_40gb": _device(40, 1555, 312),
    "a100_80gb": _device(80, 2039, 312),
    "h100_pcie": _device(80, 2000, 756, 1513),
    "h100_sxm": _device(80, 3350, 989, 1979),
    "h200_sxm": _device(141, 4800, 989, 1979),
    "b200_sxm": _device(180, 8000, 2250, 4500),
}


@dataclass(frozen=True, slots=True)
class EngineCard:
    """An engine: the share of the device's limits that its steps reach, its one figure of
    efficiency; what a step costs beside them; tokens of a step unless an operator sets them."""

    efficiency: float
    step_s: float  # of each step: launches, sampling, scheduling
    row_s: float  # of each sampled row
    step_tokens: int
    error: float  # mean absolute error of the time between tokens, over the points of its fit
    has_small_kv: bool = False  # keeps KV in fp8 where weights are


# vLLM and TensorRT-LLM are fitted to AIConfigurator's measured points of Llama-3.1-8B and Qwen3-32B
# on H100 and H200, vLLM to docs/performance.md's of Qwen3-8B over HTTP too.
ENGINES: Mapping[str, EngineCard] = {
    "vllm": EngineCard(1.0, 1.5e-3, 20e-6, 2048, 0.13),
    "trtllm": EngineCard(0.64, 0.0, 0.0, 8192, 0.12, has_small_kv=True),
}
