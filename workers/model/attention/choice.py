"""Chooses the attention back end that the operator asks for, or that fits the device."""

import os

import torch

from workers.engine.model import ModelRefused
from workers.model.attention.interface import AttentionBackend
from workers.model.attention.native import NativeAttention
from workers.model.attention.packed import PackedAttention
from workers.model.native.kernels import Kernels

_NAMES = ("auto", "torch", "triton")


def choose_attention(
    name: str, kernels: Kernels | None, device: torch.device, block_size: int
) -> AttentionBackend:
    """`kernels`: the CPU's, where there are any. Raises ModelRefused for what cannot run here."""
    if name not in _NAMES:
        raise ModelRefused(f"attention {name} is not one of {', '.join(_NAMES)}")
    if name == "triton":
        return _triton(device, block_size)
    if name == "auto" and kernels is not None:
        return NativeAttention(kernels)
    return PackedAttention()


def _triton(device: torch.device, block_size: int) -> AttentionBackend:
    """On a CPU in Triton's interpreter alone, which the variable must ask for."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ModelRefused("attention triton needs a CUDA device")
    try:
        from workers.model.attention.triton_attention import TritonAttention
    except ImportError as exc:
        raise ModelRefused("attention triton is asked for, but Triton is not installed") from exc
    return TritonAttention(block_size)
