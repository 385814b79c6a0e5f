"""Size of the KV cache: by default, and within a share of the device's memory."""

import math
from collections.abc import Callable

import torch

from workers.engine.interface import ModelRefused
from workers.model.machine import free_cpu_bytes, total_cpu_bytes

# The rest is for activations, a step's logits and other processes.
_CPU_SHARE = 0.25
_CUDA_SHARE = 0.85  # where no step was measured
# Share of the memory that the weights leave of a worker's; the rest is for activations and logits.
_KV_SHARE = 0.85
# Added to the largest step: this share of it for graphs' tensors and gaps between tensors, and
# bytes for graphs' nodes and later loads. Estimates, not measured on a GPU.
_GAP_SHARE = 0.25
_LATER_BYTES = 3 * 2**28
# A worker whose share holds the KV of fewer tokens is not worth starting.
LEAST_KV_TOKENS = 256
_GIB = 2**30


class Card:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def free_bytes(self) -> int:
        """The free memory, without what torch keeps for later."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_bytes(self, compute: Callable[[], None]) -> int:
        """Returns the most that `compute` needs beside what is held already."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        held = torch.cuda.memory_allocated(self._device)
        compute()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - held


def card_of(device: torch.device) -> Card | None:
    """Returns the device's card; None for a CPU."""
    return Card(device) if device.type == "cuda" else None


def default_kv_bytes(device: torch.device, step_bytes: int | None = None) -> int:
    """Returns what the largest step leaves of the memory that is free once the weights are loaded;
    if that step is unknown, a share of this memory."""
    free = free_bytes(device)
    if step_bytes is not None:
        return free - computing_bytes(step_bytes)
    return int(free * (_CUDA_SHARE if device.type == "cuda" else _CPU_SHARE))


def computing_bytes(step_bytes: int) -> int:
    """Memory to keep for computing if the largest step takes `step_bytes`."""
    return step_bytes + int(step_bytes * _GAP_SHARE) + _LATER_BYTES


def total_bytes(device: torch.device) -> int:
    """All memory of the device: of the card, or of the machine or container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return total_cpu_bytes()


def free_bytes(device: torch.device) -> int:
    """The memory of the device that nobody uses."""
    card = card_of(device)
    return free_cpu_bytes() if card is None else card.free_bytes


def kv_bytes_in_share(
    share: float,
    device: torch.device,
    *,
    weight_bytes: int,
    least_bytes: int,
    wanted_bytes: int | None = None,
    step_bytes: int | None = None,
) -> int:
    """Bytes for the KV cache of a worker that may use this share of its device's memory, also no
    more than is free. `least_bytes`: what the cache needs at least; `wanted_bytes`: what the
    operator asks for; `step_bytes`: see `default_kv_bytes`. Raises ModelRefused with the figures if
    they do not fit beside the weights.
    """

    def computing(kv_bytes: float) -> float:
        """The memory that the cache needs beside it."""
        return (
            kv_bytes / _KV_SHARE - kv_bytes if step_bytes is None else computing_bytes(step_bytes)
        )

    def beside(left: float) -> int:
        """The size of a cache that fits into `left` together with what it needs."""
        return (
            int(left * _KV_SHARE) if step_bytes is None else int(left) - computing_bytes(step_bytes)
        )

    whole = total_bytes(device)
    room = beside(share * whole - weight_bytes)
    needed = least_bytes if wanted_bytes is None else wanted_bytes
    if room < needed:
        fitting = (weight_bytes + needed + computing(needed)) / whole
        raise ModelRefused(
            f"memory_share {share:g} of the {_gib(whole)} of {device} is {_gib(share * whole)}; "
            f"needed are {_gib(weight_bytes)} for weights, {_gib(needed)} for the KV cache and "
            f"{_gib(computing(needed))} for computing: a share of {_up(fitting)} would fit"
        )
    if wanted_bytes is not None:
        return wanted_bytes
    room = min(room, beside(free_bytes(device)))
    if room < least_bytes:
        raise ModelRefused(
            f"memory_share {share:g} of {device} is {_gib(share * whole)}, but others have left "
            f"only {_gib(free_bytes(device))} free; the KV cache needs {_gib(least_bytes)}"
        )
    return room


def check_weights(share: float, device: torch.device, weight_bytes: int) -> None:
    """Refuses weights that exceed the worker's share of the memory, before they are loaded. Raises
    ModelRefused."""
    whole = total_bytes(device)
    if weight_bytes > share * whole:
        raise ModelRefused(
            f"memory_share {share:g} of the {_gib(whole)} of {device} is {_gib(share * whole)}; "
            f"the weights alone need {_gib(weight_bytes)}, a share of {_up(weight_bytes / whole)}"
        )


def check_free(device: torch.device, weight_bytes: int, num_free: int) -> None:
    """Raises ModelRefused for weights that exceed the `num_free` bytes of the device, before they
    are loaded."""
    if weight_bytes > num_free:
        helps = (
            "end what else uses this GPU, give --dtype bfloat16 or float16 if this is float32, or "
            "share the model between GPUs by --engine vllm --engine-arg tensor_parallel_size=N"
            if device.type == "cuda"
            else "end what else uses this machine's memory, or give --dtype bfloat16 or "
            "--quantization int8"
        )
        raise ModelRefused(
            f"the weights need {_gib(weight_bytes)}, and {device} has {_gib(num_free)} free: "
            f"{helps}, or take a smaller model"
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.3g} GiB"


def _up(share: float) -> str:
    """Formats a share with three digits, rounded up."""
    return f"{math.ceil(share * 1000) / 1000:g}" if share <= 1 else "more than 1"
