"""A chat's effort and its template's variables reach the chat template."""

from typing import Any, get_args

import pytest

from contract.model_cards import TokenizerFiles
from contract.output_formats import ReasoningFormat
from gateway.http.errors import ApiError
from gateway.prepare.generation import template_variables
from gateway.prepare.schemas import ChatBody, Effort

MESSAGES = [{"role": "user", "content": "Hi"}]
THINKS = ReasoningFormat(name="qwen3", open="<think>", close="</think>")


def files(*variables: str, reasons: bool = True, **kwargs: Any) -> TokenizerFiles:
    return TokenizerFiles(
        tokenizer_json="",
        chat_template="",
        template_variables=variables,
        template_kwargs=kwargs,
        reasoning=THINKS if reasons else None,
    )


@pytest.mark.parametrize("effort", get_args(Effort))
def test_an_effort_is_told_in_the_templates_own_words(effort: Effort) -> None:
    """As a word where it has words, as a switch where it has a switch."""
    assert template_variables(files("reasoning_effort"), effort, None) == {
        "reasoning_effort": effort
    }
    for switch in ("enable_thinking", "thinking"):
        assert template_variables(files("date", switch), effort, None) == {switch: effort != "none"}


def test_a_template_that_knows_no_effort_refuses_one() -> None:
    """By name. Without reasoning there is none to be left out."""
    refused_by: list[tuple[TokenizerFiles, Effort]] = [
        *((files("date"), "low"), (files(), "none"), (files(reasons=False), "low"))
    ]
    for known, effort in refused_by:
        with pytest.raises(ApiError) as refused:
            template_variables(known, effort, None)
        assert refused.value.param == "reasoning_effort"
    assert template_variables(files(reasons=False), "none", None) == {}


def test_a_call_wins_over_its_effort_and_the_operator() -> None:
    """The nearest to the call has the last word."""
    known = files("enable_thinking", enable_thinking=False, city="Rome")
    assert template_variables(known, None, None) == {"enable_thinking": False, "city": "Rome"}
    assert template_variables(known, "high", None)["enable_thinking"] is True
    given = {"enable_thinking": False, "city": "Oslo"}
    assert template_variables(known, "high", given) == given


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"]
)
def test_a_call_cannot_replace_what_the_gateway_sets(name: str) -> None:
    """Nor the special tokens."""
    with pytest.raises(ValueError, match="not for chat_template_kwargs"):
        ChatBody.model_validate(
            {"model": "m", "messages": MESSAGES, "chat_template_kwargs": {name: []}}
        )


@pytest.mark.parametrize("given", [[], "x", {str(i): i for i in range(65)}])
def test_variables_are_an_object_of_bounded_size(given: Any) -> None:
    """Anything else is refused."""
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        ChatBody.model_validate({"model": "m", "messages": MESSAGES, "chat_template_kwargs": given})
