"""Reads a model's weights: safetensors only, all of them, and no code of the model."""

from collections.abc import Mapping
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
_HEADLESS = "; it was saved as {}, without the head that gives the next token"


class _OwnAttentionTable(Exception):
    """The family has its own table of attention functions, without ours."""


def load_decoder(
    path: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    revision: str = DEFAULT_REVISION,
) -> nn.Module:
    """The frozen decoder, with our attention if the family supports it. Raises ModelRefused."""
    arguments = {"config": config, "dtype": dtype, "revision": revision}
    try:
        return _read(path, device, arguments | {"attn_implementation": ATTENTION_NAME})
    except _OwnAttentionTable:
        forget_attention(config)
        return _read(path, device, arguments)


def load_pooling_model(
    auto_class: Any,
    path: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    revision: str = DEFAULT_REVISION,
) -> Any:
    """A frozen prefill-only model (a PreTrainedModel) with transformers' attention, which
    `share_attention` exchanges for ours. Raises ModelRefused."""
    arguments = {"config": config, "dtype": dtype, "revision": revision}
    return _read(path, device, arguments, auto_class, unused=_UNUSED_LAYERS)


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
    auto_class: Any = AutoModelForCausalLM,
    unused: tuple[str, ...] = (),
) -> nn.Module:
    """A frozen model. `unused`: beginnings of names of weights that checkpoints need not have."""
    register_attention()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = auto_class.from_pretrained(
            path,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **_placement(device),
            **arguments,
        )
    except SafetensorError as exc:
        raise ModelRefused(f"a weight file of {path} is damaged: {first_line(exc)}") from exc
    except Exception as exc:  # transformers assumes well-formed files
        if exc.args == (ATTENTION_NAME,):
            raise _OwnAttentionTable from exc
        raise ModelRefused(f"{path} cannot be loaded: {first_line(exc)}") from exc
    model, info = loaded
    _check_weights(path, info, unused, architecture_of(arguments["config"]))
    frozen: nn.Module = model.to(device).eval().requires_grad_(False)
    return frozen


def _check_weights(
    path: str, info: Mapping[str, Any], unused: tuple[str, ...], architecture: str
) -> None:
    """Refuses incomplete checkpoints: transformers would fill in random numbers."""
    for kind in ("missing_keys", "mismatched_keys"):
        found = map(str, info.get(kind) or ())
        if names := sorted(name for name in found if not name.startswith(unused or ("\0",))):
            raise ModelRefused(
                f"the weights of {path} do not fit its configuration: "
                f"{len(names)} {kind.removesuffix('_keys')}, for example {names[0]}"
                + (_HEADLESS.format(architecture) if architecture.endswith("Model") else "")
            )
