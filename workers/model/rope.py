"""Rotary embeddings: how far scaling extends them, and one choice of it for all sequences.

transformers uses the longest position of the batch to choose longrope's factors or dynamic NTK
scaling, so a sequence's tokens would depend on its neighbours. Here both are fixed once, for the
longest sequence that this engine runs.
"""

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from workers.model.folder_check import of_each_layer
from workers.model.transformers_compat import ROPE_INIT_FUNCTIONS

# A name that modeling_rope_utils.dynamic_rope_update ignores.
_FIXED = "fixed"
# Kinds without scaling, or whose scaling `max_position_embeddings` includes.
_INCLUDED = ("default", "su", "longrope", "llama3")


def scaled_length(text: PretrainedConfig, num_positions: int) -> int:
    """Returns the positions that scaling makes of the configured ones, as vLLM counts them. yarn's
    are a multiple of the original ones: configurations have either the product or the original."""
    if "gemma3" in text.model_type:  # its configuration contains the product
        return num_positions
    scale, least = 1.0, 0.0
    for parameters in of_each_layer(getattr(text, "rope_parameters", None)):
        rope_type = str(parameters.get("rope_type"))
        factor = parameters.get("factor") or 1.0
        if "yarn" in rope_type:
            least = (parameters.get("original_max_position_embeddings") or num_positions) * factor
        elif rope_type not in _INCLUDED:
            scale = factor
    return int(max(num_positions * scale, least))


def fix_rope(decoder: nn.Module, max_model_len: int) -> int:
    """Fixes every length-dependent rotary module for `max_model_len`; returns how many."""
    num_fixed = 0
    for module in decoder.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict):
            for layer_type in list(rope_type):
                num_fixed += _fix(module, max_model_len, layer_type)
        elif isinstance(rope_type, str):
            num_fixed += _fix(module, max_model_len, None)
    return num_fixed


def _fix(module: Any, max_model_len: int, layer_type: str | None) -> bool:
    """Fixes one set of frequencies; returns False if they do not depend on length."""
    rope_type = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if rope_type != "longrope" and "dynamic" not in rope_type:
        return False
    prefix = "" if layer_type is None else f"{layer_type}_"
    parameters = module.config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    original_length = int(module.config.max_position_embeddings)
    if rope_type == "longrope":
        original_length = int(parameters["original_max_position_embeddings"])
    if max_model_len > original_length:
        buffer: torch.Tensor = getattr(module, f"{prefix}inv_freq")
        arguments = {} if layer_type is None else {"layer_type": layer_type}
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](
            module.config, buffer.device, seq_len=max_model_len, **arguments
        )
        buffer.copy_(inv_freq)
        setattr(module, f"{prefix}attention_scaling", scaling)
    if layer_type is None:
        module.rope_type = _FIXED
    else:
        module.rope_type[layer_type] = _FIXED
    return True
