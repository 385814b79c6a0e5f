"""What the worker uses of transformers beyond its documentation (transformers 5).

- `render_jinja_template` renders chats with messages as they are. What is documented leaves out
  what is null, and some templates show calls only beside content that is null.
- `ROPE_INIT_FUNCTIONS` computes frequencies for a length; what is documented does so for the
  longest position of a batch.
- `EncoderOutput` is what an encoder returns to the classifier behind it.
- The attention of a model is documented as `set_attn_implementation`, which families that keep a
  table of their own refuse, or ignore with a warning.

tests/workers/model/test_transformers_compat.py fails where a name is not there any more.
"""

from typing import Any

from transformers import PretrainedConfig
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions as EncoderOutput,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.chat_template_utils import render_jinja_template

__all__ = [
    "ROPE_INIT_FUNCTIONS",
    "EncoderOutput",
    "can_change_attention",
    "forget_attention",
    "render_jinja_template",
    "set_own_attention",
]


def can_change_attention(model: Any) -> bool:
    """Whether a model takes its attention from the table where ours is registered."""
    return bool(model._can_set_attn_implementation())


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
