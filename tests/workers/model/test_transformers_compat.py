"""transformers still provides what workers/model/transformers_compat.py and model_types_compat.py
use.
"""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaForCausalLM
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests.tiny_models import make_model
from workers.model import model_types_compat
from workers.model.model_types_compat import knows_model_type
from workers.model.transformers_compat import (
    EncoderOutput,
    by_rows,
    compute_by_rows,
    forget_attention,
    render_jinja_template,
    set_own_attention,
)

# Since transformers 5.24 states are found by index, and these have these names.
mamba2_selective_state_update: Any = getattr(
    modeling_falcon_h1, "mamba2_selective_state_update", None
)
torch_recurrent_gated_delta_rule: Any = modeling_qwen3_5.torch_recurrent_gated_delta_rule


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


ROWS, SIZE = 5, 4
# As many heads as rows: what belongs to a row is told by names. At most one row, two, or all.
by_heads_and_bytes = pytest.mark.parametrize(
    ("heads", "most"), [(2, 1), (ROWS, 1), (2, 2 * 2 * SIZE**2 * 4), (2, 2**30)]
)


@by_heads_and_bytes
def test_delta_rules_compute_a_few_rows_at_a_time(heads: int, most: int) -> None:
    """With the results of all at once; states are changed in place."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, ROWS, 1, heads, SIZE)
    decay, beta = torch.rand(2, ROWS, 1, heads)
    state = torch.randn(ROWS, heads, SIZE, SIZE)
    changed = state.clone()
    arguments = (query, key, value, -decay, beta)

    expected, new_state = torch_recurrent_gated_delta_rule(
        *arguments, initial_state=state, output_final_state=True
    )
    found, _ = by_rows(torch_recurrent_gated_delta_rule, "initial_state", most)(
        *arguments, initial_state=changed, output_final_state=True
    )

    torch.testing.assert_close(found, expected)
    if most < 2**30:  # else the function itself returns others
        torch.testing.assert_close(changed, new_state)


@pytest.mark.skipif(mamba2_selective_state_update is None, reason="transformers before 5.24")
@by_heads_and_bytes
def test_mamba_2_computes_a_few_rows_at_a_time(heads: int, most: int) -> None:
    """With the results of all at once; states are changed in place."""
    torch.manual_seed(0)
    x, step = torch.rand(2, ROWS, heads, SIZE)
    decays, skip = -torch.rand(heads, SIZE, SIZE), torch.randn(heads, SIZE)
    b, c = torch.randn(2, ROWS, 1, SIZE)
    state = torch.randn(ROWS, heads, SIZE, SIZE)
    changed = state.clone()

    arguments = (x, step, decays, b, c, skip, skip)
    expected = mamba2_selective_state_update(state, *arguments, dt_softplus=True)
    function = by_rows(mamba2_selective_state_update, "state", most)
    found = function(changed, *arguments, dt_softplus=True)

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(changed, state)


def test_a_function_with_an_unknown_argument_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What belongs to a row could not be told; a known one is exchanged once."""

    def known(state: Any, dt: Any, A: Any) -> None: ...

    def unknown(state: Any, dt: Any, gates: Any) -> None: ...

    module: Any = ModuleType("mixers")
    module.known, module.unknown = known, unknown
    monkeypatch.setitem(sys.modules, "mixers", module)
    mixer = type("Mixer", (), {"__module__": "mixers"})()

    compute_by_rows(mixer)
    exchanged = module.known
    compute_by_rows(mixer)

    assert module.unknown is unknown
    assert module.known is exchanged is not known
