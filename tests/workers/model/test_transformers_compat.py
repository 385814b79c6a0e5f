"""transformers still provides what workers/model/transformers_compat.py and model_types_compat.py
use.
"""

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaForCausalLM

from tests.tiny_models import make_model
from workers.model import model_types_compat
from workers.model.model_types_compat import knows_model_type
from workers.model.transformers_compat import (
    EncoderOutput,
    forget_attention,
    render_jinja_template,
    set_own_attention,
)


def test_chats_are_rendered_with_content_that_is_null() -> None:
    """Otherwise templates that show calls beside it alone would have no format."""
    messages = [{"role": "assistant", "content": None}]
    template = "{{ messages[0].content is none }}"
    rendered = render_jinja_template(conversations=[messages], chat_template=template)
    assert rendered[0][0] == "True"


def test_attention_functions_can_be_removed_and_restored() -> None:
    """Otherwise families with their own table could not be served."""
    decoder = make_model("llama")
    assert isinstance(decoder, LlamaForCausalLM)
    decoder.config._attn_implementation = "ours"
    set_own_attention(decoder, "ours")
    assert decoder.config._attn_implementation == "sdpa"
    forget_attention(decoder.config)
    assert decoder.config._attn_implementation is None


def test_a_classifier_takes_an_encoder_s_output() -> None:
    """By position, and every field that it hands on."""
    hidden, pooled = torch.zeros(1, 2, 3), torch.zeros(1, 3)
    output = EncoderOutput(last_hidden_state=hidden, pooler_output=pooled)
    assert output[1] is pooled
    assert output.past_key_values is None


def test_the_types_in_the_source_are_those_of_the_registry() -> None:
    """A type that only the registry had would be refused."""
    known = [name for name in CONFIG_MAPPING if knows_model_type(name)]
    assert known == list(CONFIG_MAPPING)
    assert not knows_model_type("no_such_model")
    assert not knows_model_type("LlamaConfig")


def test_without_a_registry_any_type_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`AutoConfig` then decides."""
    monkeypatch.setattr(model_types_compat, "_FILES", ("no_such_file.py",))
    assert knows_model_type("no_such_model")
