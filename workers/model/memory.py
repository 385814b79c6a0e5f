"""Size of the KV cache: by default, and within a share of the device's memory. Puts a CPU's weights
and KV cache on pages of 2 MiB.

A step reads all weights once. With 4 KiB pages that needs many page table entries, and hardware
prefetching stops at each page's end. Does nothing if the system setting is `never`.
"""

import ctypes
import math
import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from workers.engine.interface import ModelRefused
from workers.model.machine import free_cpu_bytes, total_cpu_bytes

# The rest is for activations, a step's logits and other processes.
_CPU_SHARE = 0.25
_CUDA_SHARE = 0.85  # where no step was measured
# Share of the memory that the weights leave of a worker's; the rest is for activations and logits.
_KV_SHARE = 0.85
# Added to the largest step: this share of it for gaps between tensors, and bytes for what libraries
# load later. Estimates, not measured on a GPU.
_GAP_SHARE = 0.25
_LATER_BYTES = 3 * 2**28
# A worker whose share holds the KV of fewer tokens is not worth starting.
LEAST_KV_TOKENS = 256
_GIB = 2**30


class Card:
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


_PAGE_BYTES = 2**21
# Smaller mappings hold no weights.
_SMALLEST_BYTES = 2**22
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPPINGS = Path("/proc/self/smaps")
# Private, writable and not of a file: where allocators put large tensors.
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 *(\[heap\])?$")
_RESIDENT = re.compile(r"Rss: +(\d+) kB$")
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1


def use_huge_pages(untouched: Iterable[Tensor]) -> int:
    """Converts all large mappings of this process, and `untouched` tensors, which nobody has
    written to yet. Returns the bytes converted; 0 if the system has no such pages."""
    if not _ENABLED.exists() or "[never]" in _ENABLED.read_text("utf-8"):
        return 0
    _give_back()
    for tensor in untouched:
        _advise(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, _MADV_HUGEPAGE)
    num_bytes = 0
    for begin, end in list(_filled_mappings()):
        if _advise(begin, end, _MADV_HUGEPAGE):
            num_bytes += _collapse(begin, end)
    return num_bytes


def touch(tensors: Sequence[Tensor], num_bytes: int) -> None:
    """Makes the system provide the first `num_bytes` of pages of each tensor now, without changing
    content. If that fails, pages come on the first write, as usual."""
    for tensor in tensors:
        begin = tensor.data_ptr()
        end = begin + min(tensor.nbytes, num_bytes // len(tensors))
        _advise(begin, end, _MADV_POPULATE_WRITE, page_bytes=mmap.PAGESIZE)


def _give_back() -> None:
    """Returns memory that glibc's allocator holds free (say, weights before conversion) to the
    system; it would be converted as well."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes = (ctypes.c_size_t,)
        trim(0)


def _filled_mappings() -> Iterator[tuple[int, int]]:
    """Addresses of large anonymous mappings that are mostly in use."""
    span = None
    for line in _MAPPINGS.read_text("utf-8", "replace").splitlines():
        if found := _ANONYMOUS.match(line):
            span = int(found[1], 16), int(found[2], 16)
        elif "-" in line.split(" ", 1)[0]:
            span = None
        elif span is not None and (resident := _RESIDENT.match(line)):
            is_filled = int(resident[1]) * 1024 >= _SMALLEST_BYTES
            yield from [span] * is_filled


def _collapse(begin: int, end: int) -> int:
    """Bytes converted in a mapping; a mapping with holes is converted page by page."""
    if _advise(begin, end, _MADV_COLLAPSE):
        return end - begin
    pages = range(-(-begin // _PAGE_BYTES) * _PAGE_BYTES, end - _PAGE_BYTES + 1, _PAGE_BYTES)
    return sum(_PAGE_BYTES * _advise(at, at + _PAGE_BYTES, _MADV_COLLAPSE) for at in pages)


def _advise(begin: int, end: int, advice: int, page_bytes: int = _PAGE_BYTES) -> bool:
    """Advises the whole pages within the range; returns whether the system accepted."""
    first, last = -(-begin // page_bytes) * page_bytes, end // page_bytes * page_bytes
    if last <= first:
        return False
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(libc.madvise(first, last - first, advice)) == 0
