"""Chooses what computes: the attention and the kernels that the operator asks for, or that fit
the device. What has never run on a GPU runs there only where it is asked for.
"""

import dataclasses
import os
from collections.abc import Callable

import torch

from workers.engine.model import ModelRefused
from workers.model.attention.interface import AttentionBackend, PreparedAttention
from workers.model.attention.libraries import load_flash_attention, load_flashinfer
from workers.model.attention.native import NativeAttention
from workers.model.attention.packed import PackedAttention
from workers.model.attention.rows import PreparedRows, RowsStep
from workers.model.kernels import DecoderKernels
from workers.model.native.kernels import DTYPES, Kernels
from workers.model.native.library import CannotBuild, load_library

ATTENTIONS = ("auto", "torch", "triton", "fa3", "flashinfer")


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """Who attends, who computes beside it, and what becomes of the decoder's modules."""

    attention: AttentionBackend
    kernels: DecoderKernels | None
    merges: bool  # modules are exchanged for merged ones
    packs: bool  # their weights are laid out anew, for a CPU
    prepare_rows: Callable[[RowsStep], PreparedAttention] = PreparedRows


def choose_backend(
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    progress: Callable[[str], None],
    *,
    fused: bool,
) -> Backend:
    """`fused`: modules may be exchanged. Raises ModelRefused for what cannot run here."""
    if attention not in ATTENTIONS:
        raise ModelRefused(f"attention {attention} is not one of {', '.join(ATTENTIONS)}")
    if attention == "triton":
        return _triton(dtype, device, block_size, fused=fused)
    if attention in ("fa3", "flashinfer"):
        return _library(attention, dtype, device, block_size, fused=fused)
    is_cpu = device.type == "cpu"
    native = _native(dtype, progress) if is_cpu and fused else None
    if native is not None and attention == "auto":
        return Backend(NativeAttention(native), native, merges=True, packs=True)
    return Backend(PackedAttention(), native, merges=is_cpu and fused, packs=True)


def _triton(dtype: torch.dtype, device: torch.device, block_size: int, *, fused: bool) -> Backend:
    """On a CPU in Triton's interpreter alone, which the variable must ask for."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ModelRefused("attention triton needs a CUDA device")
    try:
        from workers.model.attention.triton_attention import TritonAttention
        from workers.model.gpu.kernels import TritonKernels
    except ImportError as exc:
        raise ModelRefused("attention triton is asked for, but Triton is not installed") from exc
    kernels = TritonKernels(dtype) if fused else None
    triton = TritonAttention(block_size)
    return Backend(triton, kernels, fused, packs=False, prepare_rows=triton.prepare_rows)


def _library(
    name: str, dtype: torch.dtype, device: torch.device, block_size: int, *, fused: bool
) -> Backend:
    """Another library's attention, and our own kernels beside it."""
    if device.type != "cuda":
        raise ModelRefused(f"attention {name} needs a CUDA device")
    if name == "fa3":
        library = load_flash_attention(block_size)
    else:
        library = load_flashinfer(block_size, device)
    beside = _triton(dtype, device, block_size, fused=fused)
    return dataclasses.replace(beside, attention=library, prepare_rows=PreparedRows)


def _native(dtype: torch.dtype, progress: Callable[[str], None]) -> Kernels | None:
    """None without a compiler, and for types that they do not have."""
    if dtype not in DTYPES:
        return None
    try:
        return Kernels(load_library(), dtype)
    except CannotBuild as reason:
        progress(f"no CPU kernels of our own, torch does their work: {reason}")
        return None
