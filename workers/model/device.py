"""Chooses the device and the type of the weights, and refuses what could not compute there."""

import re
from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from workers.engine.interface import ModelRefused
from workers.model.checkpoint import first_line
from workers.model.nvidia import unusable_gpu, visible_gpus

Capability = tuple[int, int]  # a GPU's compute capability: 8.9 is (8, 9)

# From which tensor cores multiply bfloat16 (A100).
_BFLOAT16_CAPABILITY: Capability = (8, 0)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """`name`: auto, cpu or cuda. Raises ModelRefused, also for auto where nvidia-smi sees a GPU
    that torch cannot use: the CPU would be slower by far."""
    if name not in ("auto", "cpu", "cuda"):
        raise ModelRefused(f"device {name} is not one of auto, cpu, cuda")
    avoid_cudnn_attention()
    if name == "cpu":
        return torch.device(name)
    if torch.cuda.is_available():
        device = torch.device("cuda")
        capability = torch.cuda.get_device_capability(device)
        if fault := architecture_fault(capability, torch.cuda.get_arch_list()):
            raise ModelRefused(f"{torch.cuda.get_device_name(device)}: {fault}")
        return device
    gpus = visible_gpus()
    if gpus and (fault := unusable_gpu(gpus, torch.version.cuda, _own_reason())):
        raise ModelRefused(f"{fault}; to compute on the CPU give --device cpu")
    if name == "cuda":
        raise ModelRefused("device cuda is asked for, but torch finds no CUDA device here")
    return torch.device("cpu")


def _own_reason() -> str:
    """Why torch finds no GPU, in its words."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as exc:
        return first_line(exc)
    return "torch.cuda.is_available() is false"


def architecture_fault(capability: Capability, built_for: Sequence[str]) -> str | None:
    """Why this build of torch has no kernels for a GPU; None if it has. `built_for`: sm_80 runs on
    8.x from 8.0 on, sm_90a on 9.0 alone, and a driver translates compute_90 for all later ones."""
    found = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name) for name in built_for]
    builds = [(m[1], (int(m[2]), int(m[3])), m[4]) for m in found if m is not None]

    def runs(kind: str, built: Capability, suffix: str) -> bool:
        if suffix == "a" or capability < built:
            return capability == built
        return kind == "compute" or built[0] == capability[0]

    if not builds or any(runs(*build) for build in builds):
        return None
    return (
        f"its compute capability is {_shown(capability)}, and this build of torch has no kernels "
        f"for it ({' '.join(built_for)}): install another build, or give --device cpu"
    )


def capability_of(device: torch.device) -> Capability | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def gpu_uuids(device: torch.device) -> tuple[str, ...]:
    """The GPU's uuid, as nvidia-smi names it; none of a CPU."""
    gpus = visible_gpus() if device.type == "cuda" else ()
    return tuple(gpu.uuid for gpu in gpus[:1])


def choose_dtype(name: str, config: PretrainedConfig, capability: Capability | None) -> torch.dtype:
    """auto: float32 on a CPU; on a GPU the checkpoint's own half type, or bfloat16; float16 where
    the GPU has no bfloat16. capability None: a CPU. Raises ModelRefused."""
    has_bfloat16 = capability is None or capability >= _BFLOAT16_CAPABILITY
    if name == "auto":
        if capability is None:
            return torch.float32
        own = config.get_text_config().dtype
        wanted = own if own in (torch.float16, torch.bfloat16) else torch.bfloat16
        return wanted if has_bfloat16 else torch.float16
    if name not in _DTYPES:
        raise ModelRefused(f"dtype {name} is not one of auto, {', '.join(_DTYPES)}")
    if name == "bfloat16" and not has_bfloat16:
        assert capability is not None
        raise ModelRefused(
            f"dtype bfloat16 needs a GPU of compute capability {_shown(_BFLOAT16_CAPABILITY)} or "
            f"more, as A100 or L4; this one has {_shown(capability)}: give --dtype float16"
        )
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def avoid_cudnn_attention() -> None:
    """Switches off cuDNN's attention, which SDPA prefers from torch 2.11 on: it builds a graph for
    every new shape, and the shape of a context changes with each token."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def _shown(capability: Capability) -> str:
    return ".".join(map(str, capability))
