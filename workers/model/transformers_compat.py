"""What the worker uses of transformers beyond its documentation (transformers 5).

- `render_jinja_template` renders chats with messages as they are. What is documented leaves out
  what is null, and some templates show calls only beside content that is null.
- `ROPE_INIT_FUNCTIONS` computes frequencies for a length; what is documented does so for the
  longest position of a batch.
- `EncoderOutput` is what an encoder returns to the classifier behind it.
- The states of recurrent and convolution layers lie in a `LinearAttentionLayer`, by index since
  transformers 5.24; its mixers read and change them there. What is documented makes such layers
  for whole sequences of equal length.
- The reference functions that update states lie beside the mixers' classes, and tell by the names
  of their arguments what belongs to a row.
- The attention of a model is documented as `set_attn_implementation`, which families that keep a
  table of their own refuse, or ignore with a warning.

tests/workers/model/test_transformers_compat.py fails where a name is not there any more.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions as EncoderOutput,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.chat_template_utils import render_jinja_template

__all__ = [
    "ROPE_INIT_FUNCTIONS",
    "STATE_NAMES",
    "EncoderOutput",
    "by_rows",
    "cache_of",
    "can_change_attention",
    "compute_by_rows",
    "forget_attention",
    "has_attention",
    "has_kv",
    "has_state",
    "render_jinja_template",
    "set_own_attention",
    "states_of",
]

# Argument and output names of the state: since transformers 5.24, before it by family, RWKV's.
STATE_NAMES = ("cache", "past_key_values", "cache_params", "state")
_STATE_KINDS = ("conv_states", "recurrent_states")


def has_state(layer: Any) -> bool:
    """Whether a layer of a cache is made for states that are found by index."""
    made_by = inspect.signature(LinearAttentionCacheLayerMixin.__init__).parameters
    return "number_of_states" in made_by and isinstance(layer, LinearAttentionCacheLayerMixin)


def has_kv(layer: Any) -> bool:
    """Whether a layer of a cache, after a forward, holds keys and values."""
    return isinstance(layer, CacheLayerMixin) and layer.is_initialized


def states_of(layer: Any) -> dict[tuple[str, int], Tensor]:
    """The states (batch, …) that a layer of a cache holds, by kind and index."""
    return {
        (kind, index): state
        for kind in _STATE_KINDS
        for index, state in getattr(layer, kind).items()
        if state is not None
    }


def cache_of(layer_idx: int, states: Mapping[tuple[str, int], Tensor], *, is_new: bool) -> Cache:
    """A cache for layer `layer_idx` alone, which changes `states` in place. `is_new`: what they
    hold is not read."""
    layer = LinearAttentionLayer(number_of_states=1 + max(index for _, index in states))
    for (kind, index), state in states.items():
        getattr(layer, kind)[index] = state
        getattr(layer, f"is_{kind}_initialized")[index] = True
        layer.has_previous_state[index] = not is_new
        if kind == "conv_states":
            layer.conv_kernel_size[index] = state.shape[-1]
    layers: list[Any] = [None] * layer_idx
    return Cache(layers=[*layers, layer])


# What those of the reference functions that continue from a state take for each row of a batch.
_OF_ROWS = {
    *("query", "key", "value", "g", "beta", "initial_state"),
    *("state", "hidden_states", "dt", "B", "C", "z"),
}
_OF_ALL = {
    *("A", "D", "dt_bias", "dt_softplus", "chunk_size", "output_final_state"),
    *("use_qk_l2norm_in_kernel", "kwargs"),
}
_STATE_BYTES = 2**21  # of rows that are computed at once; a processor's cache holds as much


def compute_by_rows(mixer: Any) -> None:
    """Makes the reference functions beside a mixer's class, which update states with several passes
    over all of a step, call themselves for a few rows at a time: their states stay in the cache.
    One with an argument that is not known here is left as it is."""
    beside = vars(sys.modules[type(mixer).__module__])
    for name, function in list(beside.items()):
        if inspect.isfunction(function) and not hasattr(function, "computes_by_rows"):
            names = inspect.signature(function).parameters.keys()
            for state_name in {"state", "initial_state"} & names:
                if names <= _OF_ROWS | _OF_ALL:
                    beside[name] = by_rows(function, state_name)


def by_rows(function: Callable[..., Any], state_name: str, most: int = _STATE_BYTES) -> Any:
    """Calls the function for rows whose states (rows, …) have `most` bytes, and changes these in
    place. It returns a tensor of all rows, alone or with the new states."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        more = given.pop("kwargs", {})
        states = given.get(state_name)
        if states is None or states.nbytes <= most:
            return function(*args, **kwargs)
        found = []
        num_rows = max(1, most * len(states) // states.nbytes)
        for rows in (slice(at, at + num_rows) for at in range(0, len(states), num_rows)):
            part = {n: x[rows] if n in _OF_ROWS and x is not None else x for n, x in given.items()}
            result = function(**part, **more)
            if isinstance(result, tuple):
                result, new_states = result
                part[state_name].copy_(new_states)
            found.append(result)
        output = torch.cat(found)
        return (output, states) if state_name == "initial_state" else output

    computed.computes_by_rows = True  # type: ignore[attr-defined]
    return computed


def can_change_attention(model: Any) -> bool:
    """Whether a model takes its attention from the table where ours is registered."""
    return bool(model._can_set_attn_implementation())


def has_attention(model: Any, name: str) -> bool:
    """Whether a model uses the attention of that name now."""
    return bool(model.config._attn_implementation == name)


def forget_attention(config: PretrainedConfig) -> None:
    """Lets the next model of this configuration choose its attention itself."""
    config._attn_implementation = None


def set_own_attention(decoder: Any, ours: str) -> None:
    """Takes our attention back out of a decoder, for transformers' own."""
    if decoder.config._attn_implementation != ours:
        return
    name = "sdpa" if decoder._supports_sdpa else "eager"
    if decoder._can_set_attn_implementation():
        decoder.set_attn_implementation(name)
    else:  # no attention of its looks there, but its masks may depend on it
        decoder.config._attn_implementation = name
