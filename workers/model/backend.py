"""Chooses the attention and kernels: what the operator asked for, or what fits the device."""

import dataclasses
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from workers.engine.interface import ModelRefused
from workers.model.attention.interface import AttentionBackend, PreparedAttention
from workers.model.attention.packed import PackedAttention
from workers.model.attention.reference import PreparedRows, RowsStep
from workers.model.device import BFLOAT16_CAPABILITY, capability_of
from workers.model.kernels import DecoderKernels
from workers.model.linear import Layout
from workers.model.native.attention import NativeAttention
from workers.model.native.kernels import DTYPES, Kernels
from workers.model.native.library import CannotBuild, library_path, load_library
from workers.model.products import Processor, Products, figures_file, find_processor

ATTENTIONS = ("auto", "torch", "triton")


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """The attention, the other kernels, and how the decoder's modules are replaced."""

    attention: AttentionBackend
    kernels: DecoderKernels | None
    merges: bool  # replace modules by merged ones
    layout: Layout  # of their weights
    prepare_rows: Callable[[RowsStep], PreparedAttention] = PreparedRows
    for_gpu: bool = False  # a fast one
    use_torch_prompts: Callable[[], None] | None = None  # leaves whole prompts to torch


def choose_backend(
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    progress: Callable[[str], None],
    *,
    fused: bool,
    weight_bytes: int = 0,
    processor: Processor | None = None,
) -> Backend:
    """Returns what runs the model. `fused`: modules may be replaced; `weight_bytes`: of the model;
    `processor`: of a CPU, default the current one. Raises ModelRefused."""
    if attention not in ATTENTIONS:
        raise ModelRefused(f"attention {attention} is not one of {', '.join(ATTENTIONS)}")
    if attention == "triton" or (attention == "auto" and has_fast_gpu(device)):
        return _triton(dtype, device, block_size, fused=fused)
    if device.type != "cpu" or not fused:
        merges = device.type != "cpu" and fused
        return Backend(PackedAttention(), None, merges=merges, layout=Layout())
    processor = processor or find_processor()
    kernels, figures = _native(processor, progress)
    products = Products(kernels, processor.products, weight_bytes=weight_bytes, kept_in=figures)
    native = kernels.get(dtype)
    own_attention = native is not None and attention == "auto"
    return Backend(
        NativeAttention(native) if native is not None and own_attention else PackedAttention(),
        native,
        merges=True,
        layout=Layout(products, native),
    )


def has_fast_gpu(device: torch.device) -> bool:
    """Whether Triton's kernels, steps ahead and graphs are the default there."""
    capability = capability_of(device)
    return (
        capability is not None
        and capability >= BFLOAT16_CAPABILITY
        and find_spec("triton") is not None
    )


def _triton(dtype: torch.dtype, device: torch.device, block_size: int, *, fused: bool) -> Backend:
    """Triton's back end. On a CPU an environment variable must select Triton's interpreter."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ModelRefused("attention triton needs a CUDA device")
    try:
        from workers.model.attention.triton_attention import TritonAttention
        from workers.model.attention.varlen import can_vary
        from workers.model.gpu.kernels import TritonKernels
    except ImportError as exc:
        raise ModelRefused("attention triton is asked for, but Triton is not installed") from exc
    kernels = TritonKernels(dtype) if fused else None
    triton = TritonAttention(block_size)
    return Backend(
        triton,
        kernels,
        fused,
        Layout(),
        prepare_rows=triton.prepare_rows,
        for_gpu=has_fast_gpu(device),
        use_torch_prompts=triton.use_torch_prompts if can_vary(dtype, device) else None,
    )


def _native(
    processor: Processor, progress: Callable[[str], None]
) -> tuple[dict[torch.dtype, Kernels], Path | None]:
    """Our kernels by type, and the folder for timings; nothing without a compiler."""
    try:
        library = load_library(processor.isa)
        figures = figures_file(library_path(processor.isa))
    except CannotBuild as reason:
        progress(f"torch computes in place of our CPU kernels: {reason}")
        return {}, None
    return {dtype: Kernels(library, dtype) for dtype in DTYPES}, figures
