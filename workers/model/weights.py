"""Reads a model's weights: safetensors only, all of them, and no code of the model."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as transformers_logging

from workers.engine.interface import ModelRefused
from workers.model.attention.interface import ATTENTION_NAME, register_attention
from workers.model.checkpoint import DEFAULT_REVISION, architecture_of, first_line
from workers.model.transformers_compat import (
    can_change_attention,
    forget_attention,
    set_own_attention,
)

# An embedding is made of the tokens' vectors, not of what BERT's pooler makes of the first.
_UNUSED_LAYERS = ("pooler.",)
_TELL_EVERY_S = 2.0
_HEADLESS = "; it was saved as {}, without the head that gives the next token"


class _OwnAttentionTable(Exception):
    """The family has its own table of attention functions, without ours."""


def load_decoder(
    path: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    revision: str = DEFAULT_REVISION,
    *,
    progress: Callable[[str], None],
) -> nn.Module:
    """The frozen decoder, with our attention if the family supports it. Raises ModelRefused."""
    arguments = {"config": config, "dtype": dtype, "revision": revision}
    try:
        ours = {"attn_implementation": ATTENTION_NAME}
        return _read(path, device, arguments | ours, progress)
    except _OwnAttentionTable:
        forget_attention(config)
        return _read(path, device, arguments, progress)


def load_pooling_model(
    auto_class: Any,
    path: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    revision: str = DEFAULT_REVISION,
    *,
    progress: Callable[[str], None],
) -> Any:
    """A frozen prefill-only model (a PreTrainedModel) with transformers' attention, which
    `share_attention` exchanges for ours. Raises ModelRefused."""
    arguments = {"config": config, "dtype": dtype, "revision": revision}
    return _read(path, device, arguments, progress, auto_class, unused=_UNUSED_LAYERS)


def share_attention(model: Any) -> bool:
    """Gives a model our attention; False if its family has a table of its own."""
    if not can_change_attention(model):
        return False
    model.set_attn_implementation(ATTENTION_NAME)
    return True


def use_own_attention(decoder: Any) -> None:
    """Takes our attention back out, for transformers' own."""
    set_own_attention(decoder, ATTENTION_NAME)


def _placement(device: torch.device) -> dict[str, Any]:
    """Arguments that put weights straight on a GPU if accelerate is installed, which transformers
    needs for it. Otherwise they pass through the CPU's memory."""
    if device.type == "cpu" or find_spec("accelerate") is None:
        return {}
    return {"device_map": {"": device}}


def _read(
    path: str,
    device: torch.device,
    arguments: Mapping[str, Any],
    progress: Callable[[str], None],
    auto_class: Any = AutoModelForCausalLM,
    unused: tuple[str, ...] = (),
) -> nn.Module:
    """A frozen model. `unused`: beginnings of names of weights that checkpoints need not have."""
    register_attention()

    def tell(
        make_bar: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        if named.get("desc") == "Loading weights" and isinstance(arguments[0], Collection):
            return told_items(arguments[0], "read {} of {} weights", progress)
        return make_bar(*arguments, **named)

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    previous = transformers_logging.set_tqdm_hook(tell)
    try:
        loaded: Any = auto_class.from_pretrained(
            path,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name and shape
            **_placement(device),
            **arguments,
        )
    except SafetensorError as exc:
        raise ModelRefused(f"a weight file of {path} is damaged: {first_line(exc)}") from exc
    except Exception as exc:  # transformers assumes well-formed files
        if exc.args == (ATTENTION_NAME,):
            raise _OwnAttentionTable from exc
        raise ModelRefused(f"{path} cannot be loaded: {first_line(exc)}") from exc
    finally:
        transformers_logging.set_tqdm_hook(previous)
    model, info = loaded
    _check_weights(path, info, unused, architecture_of(arguments["config"]))
    frozen: nn.Module = model.to(device).eval().requires_grad_(False)
    return frozen


def told_items(
    items: Collection[Any],
    text: str,
    progress: Callable[[str], None],
    clock_s: Callable[[], float] = time.monotonic,
) -> Iterator[Any]:
    """Yields the items, and tells every few seconds how many of how many are done."""
    told_s = clock_s()
    for num_done, item in enumerate(items):
        if clock_s() - told_s >= _TELL_EVERY_S:
            told_s = clock_s()
            progress(text.format(num_done, len(items)))
        yield item


def _check_weights(
    path: str, info: Mapping[str, Any], unused: tuple[str, ...], architecture: str
) -> None:
    """Refuses incomplete checkpoints: transformers would fill in random numbers."""
    found = {kind: list(info.get(f"{kind}_keys") or ()) for kind in ("missing", "mismatched")}
    shapes = {str(name): (list(own), list(wanted)) for name, own, wanted in found["mismatched"]}
    for kind, names in (("missing", map(str, found["missing"])), ("mismatched", shapes)):
        if wrong := sorted(name for name in names if not name.startswith(unused or ("\0",))):
            own, wanted = shapes.get(wrong[0], ((), ()))
            raise ModelRefused(
                f"the weights of {path} do not fit its configuration: {len(wrong)} {kind}, for "
                f"example {wrong[0]}"
                + (f" of the shape {own}, which config.json makes {wanted}" if own else "")
                + (_HEADLESS.format(architecture) if architecture.endswith("Model") else "")
            )
