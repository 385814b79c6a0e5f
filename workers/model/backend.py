"""Chooses the attention and kernels: what the operator asked for, or what fits the device."""

import dataclasses
import logging
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from workers.engine.interface import ModelRefused
from workers.model.attention.interface import AttentionBackend, LayerShape
from workers.model.attention.packed import PackedAttention
from workers.model.attention.varlen import fault_of
from workers.model.matmul_choice import Layout, Processor, Products, figures_file, find_processor
from workers.model.native.kernels import DTYPES, Kernels, NativeAttention
from workers.model.native.library import CannotBuild, library_path, load_library

log = logging.getLogger("batchway.engine")

ATTENTIONS = ("auto", "torch")


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """The attention, the other kernels, and how the weights of replaced modules are stored; None:
    no module is replaced."""

    attention: AttentionBackend
    kernels: Kernels | None = None
    layout: Layout | None = None


def choose_backend(
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None],
    *,
    fused: bool,
    shapes: Collection[LayerShape] = (),
    weight_bytes: int = 0,
    processor: Processor | None = None,
) -> Backend:
    """Returns what runs the model. `fused`: modules may be replaced, on a CPU; `shapes`: of the
    layers; `weight_bytes`: of the model; `processor`: of a CPU, default the current one. Raises
    ModelRefused."""
    if attention not in ATTENTIONS:
        raise ModelRefused(f"attention {attention} is not one of {', '.join(ATTENTIONS)}")
    if device.type != "cpu":
        return Backend(
            PackedAttention(flash=attention == "auto" and _has_flash(shapes, dtype, device))
        )
    if not fused:
        return Backend(PackedAttention())
    processor = processor or find_processor()
    kernels, figures = _native(processor, progress)
    products = Products(kernels, processor.products, weight_bytes=weight_bytes, kept_in=figures)
    native = kernels.get(dtype)
    own_attention = native is not None and attention == "auto"
    return Backend(
        NativeAttention(native) if native is not None and own_attention else PackedAttention(),
        native,
        Layout(products, native),
    )


def _has_flash(shapes: Collection[LayerShape], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether FlashAttention agrees with the reference in all layers for which torch has it."""
    faults = (fault_of(shape, dtype, device) for shape in shapes)
    if fault := next(filter(None, faults), None):
        log.warning("torch's FlashAttention is not used for whole prompts: %s", fault)
    return fault is None


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
