"""Text that is spelled like an added token is text: whatever forces it, it is answered."""

import json
from typing import Any

import pytest

from gateway.grammars.compiled import Kind, compile_grammar
from tests.grammars.walks import draw, judge
from tests.marked_tokenizer import ORDINARY, SPECIAL, MarkedModel

MODEL = MarkedModel()
SPELLINGS = [*SPECIAL, *ORDINARY, "<eos>", "\u2581\u2581"]


def forcing(text: str) -> dict[str, tuple[Kind, Any, str]]:
    """Constraints that leave one output, and that output."""
    quoted = json.dumps(text, ensure_ascii=False)
    properties = {"properties": {text: {"const": text}}, "required": [text]}
    schema = {"type": "object", **properties, "additionalProperties": False}
    pattern = "".join(f"[{char}]" if char not in "[]|^\\" else f"\\{char}" for char in text)
    return {
        "choice": (Kind.CHOICE, [text], text),
        "longer choice": (Kind.CHOICE, [f"a{text}b{text}"], f"a{text}b{text}"),
        "const": (Kind.JSON_SCHEMA, {"const": text}, quoted),
        "enum": (Kind.JSON_SCHEMA, {"enum": [text]}, quoted),
        "property": (Kind.JSON_SCHEMA, schema, f"{{{quoted}: {quoted}}}"),
        "pattern": (Kind.JSON_SCHEMA, {"type": "string", "pattern": f"^{pattern}$"}, quoted),
        "expression": (Kind.REGEX, pattern, text),
        "grammar": (Kind.GRAMMAR, f"start: {quoted} {quoted}", text * 2),
    }


@pytest.mark.parametrize("text", SPELLINGS)
@pytest.mark.parametrize("forces", [True, False], ids=["forced", "masked"])
def test_text_spelled_like_an_added_token_is_answered(text: str, forces: bool) -> None:
    """By the tokens that are forced, and by masks alone, as with log probabilities."""
    for kind, value, expected in forcing(text).values():
        grammar = compile_grammar(kind, value)
        output = draw(MODEL.grammars, grammar, 1, forces=forces)
        assert output is not None
        assert MODEL.text(output) == expected
        added = MODEL.tokenizer.get_added_tokens_decoder()
        marks = [added[i].content for i in output if i in added]
        assert set(marks) <= {"[MARK]", "aha"}, "the others are no text"


@pytest.mark.parametrize("text", SPELLINGS)
def test_text_beside_other_text_may_be_spelled_so(text: str) -> None:
    """Where the model chooses: one of two alternatives, in any seed."""
    grammar = compile_grammar(Kind.CHOICE, [f"{text}a", f"{text}b", "c"])
    outputs = {MODEL.text(draw(MODEL.grammars, grammar, seed) or []) for seed in range(40)}
    assert outputs == {f"{text}a", f"{text}b", "c"}


def test_drafts_follow_text_spelled_like_an_added_token() -> None:
    """Masks behind drafted tokens are those of the same tokens, taken."""
    grammar = compile_grammar(Kind.CHOICE, ["<think>yes</think>", "<think>no"])
    matcher = MODEL.grammars.matcher(grammar)
    drafted = [*b"<think>y"]
    assert matcher.num_allowed(drafted) == len(drafted)
    masks = MODEL.grammars.forbidden([matcher], [drafted])
    for token_id, mask in zip(drafted, masks, strict=False):
        assert not mask[token_id]
        matcher.consume(token_id)
    assert (MODEL.grammars.forbidden([matcher])[0] == masks[-1]).all()


def test_added_tokens_are_no_text() -> None:
    """The token itself is refused where text is expected."""
    grammar = compile_grammar(Kind.REGEX, "[^x]*")
    [think] = MODEL.ids("<think>")
    assert judge(MODEL.grammars, grammar, [think]) == "refused 0"
    assert judge(MODEL.grammars, grammar, [*b"<think>"]) == "whole"
