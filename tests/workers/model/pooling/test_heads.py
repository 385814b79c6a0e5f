"""Heads behind an encoder: what they compute, and what they leave behind."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.tiny_encoders import make_config
from workers.model.pooling.encoders import Text
from workers.model.pooling.folder import LogitScore
from workers.model.pooling.heads import LogitHead, ModelHead

TEXTS = [Text([7]), Text([8, 9, 10]), Text([11, 12, 13])]


def rows_of(encoder: Any) -> torch.Tensor:
    """The rows of all tokens of the texts."""
    return torch.cat(
        [encoder(torch.tensor([text.token_ids])).last_hidden_state[0] for text in TEXTS]
    )


@pytest.mark.parametrize("cap", [None, 0.5])
@torch.inference_mode()
def test_a_score_needs_the_logits_of_its_tokens_alone(cap: float | None) -> None:
    """Where the model caps its logits, its own layers compute them."""
    torch.manual_seed(0)
    config = make_config("gemma3_embedding", final_logit_softcapping=cap)
    auto_class: Any = transformers.AutoModelForCausalLM
    model = auto_class.from_config(config).eval()
    nn.init.normal_(model.lm_head.weight)
    encoder = model.get_decoder()
    rows = rows_of(encoder)
    logits = [model(torch.tensor([text.token_ids])).logits[0, -1] for text in TEXTS]
    calls: list[object] = []

    head = LogitHead(model, encoder, LogitScore(40, 50))
    model.lm_head.register_forward_hook(lambda *call: calls.append(call))
    scores = head(rows, TEXTS)

    expected = torch.stack([each[40] - each[50] for each in logits])
    torch.testing.assert_close(scores[:, 0], expected, atol=1e-5, rtol=1e-5)
    assert bool(calls) == (cap is not None)


@torch.inference_mode()
def test_a_head_lets_go_of_a_step_s_rows() -> None:
    """They would stay in memory until the next step."""
    auto_class: Any = transformers.AutoModelForSequenceClassification
    model = auto_class.from_config(make_config("bert"))
    rows = rows_of(model.bert)
    head = ModelHead(model, model.bert)

    assert len(head(rows, TEXTS)) == len(TEXTS)

    stand_in: Any = model.bert
    assert stand_in.hidden.numel() == 0
