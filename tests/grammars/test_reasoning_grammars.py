"""A constraint binds the answer behind the reasoning, in every format; a budget bounds the
reasoning. What a grammar allows, the worker reads so."""

import json
import re

import msgspec
import pytest

from contract.output_formats import ReasoningFormat
from gateway.grammars.compiled import Kind, compile_grammar
from tests.fakes import EOS_ID
from tests.grammars.walks import draw, judge
from tests.marked_tokenizer import MarkedModel
from workers.output.formats import REASONING_FORMATS
from workers.output.parser import OutputParser

MARK = re.compile(r"""</?[|｜]?[\w▁.:｜-]+[|｜]?>|\[[A-Z /]{3,}\]""")
NAMES = [f"{each.name}-{number}" for number, each in enumerate(REASONING_FORMATS)]
FORMATS = pytest.mark.parametrize("format_", REASONING_FORMATS, ids=NAMES)
SPELLED = pytest.mark.parametrize("are_tokens", [True, False], ids=["tokens", "text"])
STATES = ["none", "open", "closed"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"enum": [1, None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ANSWER = '{"a": "x<th", "b": 1}'
THOUGHT = 'I see {"a": 1}, <b> and\n\nmore.'


def model_of(format_: ReasoningFormat, *, are_tokens: bool) -> MarkedModel:
    text = "\n".join(each for each in msgspec.structs.astuple(format_) if isinstance(each, str))
    return MarkedModel(dict.fromkeys(MARK.findall(text)) if are_tokens else (), format_)


def grammar_of(model: MarkedModel, state: str, budget: int | None = None) -> str:
    return compile_grammar(Kind.JSON_SCHEMA, SCHEMA, True, model.around(state, budget))


def prompt_of(format_: ReasoningFormat, state: str) -> str:
    """The end of a prompt that leaves the reasoning so."""
    if format_.is_harmony:
        return "<|start|>assistant"
    return {"none": "?", "open": format_.open, "closed": format_.open + format_.close}[state]


def read(model: MarkedModel, state: str, text: str) -> tuple[str, str]:
    """The reasoning and the content that the worker finds."""
    assert model.files.reasoning is not None
    parser = OutputParser(None, model.files.reasoning, prompt_of(model.files.reasoning, state), {})
    delta = parser.push(text)
    delta.extend(parser.finish())
    return delta.reasoning, delta.content


def written(format_: ReasoningFormat, state: str, thought: str | None, answer: str) -> str:
    """An output as the model was trained to write it."""
    if thought is None and state == "none":
        return format_.before_first_answer + answer + format_.after_answer
    reasoned = f"{thought}{format_.close}" if state in ("none", "open") else ""
    opening = format_.open if state == "none" else ""
    return f"{opening}{reasoned}{format_.before_answer}{answer}{format_.after_answer}"


def outputs_of(format_: ReasoningFormat) -> list[tuple[str, str | None, str]]:
    """State, thought and output: of all that the format has."""
    found: list[tuple[str, str | None]] = [("none", THOUGHT), ("none", None), ("open", THOUGHT)]
    if not format_.is_harmony:  # no prompt of which ends its reasoning
        found.append(("closed", None))
    return [(state, thought, written(format_, state, thought, ANSWER)) for state, thought in found]


@FORMATS
@SPELLED
@pytest.mark.each_value
def test_the_answer_behind_the_reasoning_is_bound(
    format_: ReasoningFormat, are_tokens: bool
) -> None:
    """It must follow, and must fit; the reasoning is free."""
    model = model_of(format_, are_tokens=are_tokens)
    for state, thought, text in outputs_of(format_):
        grammar = grammar_of(model, state)
        assert judge(model.grammars, grammar, model.ids(text)) == "whole", (state, text)
        wrong = text.replace('"b": 1', '"b": 2')
        assert judge(model.grammars, grammar, model.ids(wrong)).startswith("refused"), (state, text)
        without = text.partition(ANSWER)[0]
        assert judge(model.grammars, grammar, model.ids(without)) == "begun"
        if not (format_.is_harmony and state == "open"):
            reasoning, content = read(model, state, text)
            assert (reasoning, content.strip()) == ((thought or "").strip(), ANSWER)


BY_TOKENS = [
    pytest.param(each, id=name)
    for each, name in zip(REASONING_FORMATS, NAMES, strict=True)
    if MARK.match(each.close.strip())
]
ENDED_BY_TOKENS = pytest.mark.parametrize("format_", BY_TOKENS)


@ENDED_BY_TOKENS
def test_outputs_that_a_grammar_allows_are_read_so(format_: ReasoningFormat) -> None:
    """Whatever the model draws, the content is an answer that fits."""
    model = model_of(format_, are_tokens=True)
    for state in ["none"] if format_.is_harmony else STATES:
        grammar = grammar_of(model, state)
        outputs = [draw(model.grammars, grammar, seed) for seed in range(4)]
        whole = [model.text(output) for output in outputs if output is not None]
        for text in whole:
            answer = json.loads(read(model, state, text)[1])
            assert answer.keys() == {"a", "b"}
        assert whole


@ENDED_BY_TOKENS
@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("constrains", [True, False], ids=["schema", "free"])
@pytest.mark.each_value
def test_a_budget_bounds_the_reasoning(
    format_: ReasoningFormat, budget: int, constrains: bool
) -> None:
    """Its end is forced, and it cannot begin again; fewer tokens are free."""
    model = model_of(format_, are_tokens=True)
    kind, value = (Kind.JSON_SCHEMA, SCHEMA) if constrains else (Kind.TEXT, None)
    for state in ("none",) if format_.is_harmony else ("none", "open"):
        grammar = compile_grammar(kind, value, True, model.around(state, budget))
        opening = model.ids(format_.open.strip()) if state == "none" else []
        outputs = [draw(model.grammars, grammar, seed, start=opening) for seed in range(9)]
        [close, *_] = model.ids(format_.close.strip())
        counts = {each.index(close) - len(opening) for each in outputs if each is not None}
        assert max(counts) == budget
    text = written(format_, "none", "x" * budget, ANSWER)
    grammar = compile_grammar(kind, value, True, model.around("none", budget + 4))
    assert judge(model.grammars, grammar, model.ids(text)) == "whole"


@FORMATS
def test_an_answer_without_a_constraint_is_free(format_: ReasoningFormat) -> None:
    """With a budget alone: any text, and added tokens that belong to no format; until its end."""
    model = model_of(format_, are_tokens=True)
    grammar = compile_grammar(Kind.TEXT, None, True, model.around("none", 100))
    for thought in (THOUGHT, None):
        text = written(format_, "none", thought, "Any <b> text.\n[INST] More.")
        token_ids = model.ids(text)
        assert judge(model.grammars, grammar, token_ids) == "whole", text
        assert judge(model.grammars, grammar, [*token_ids, EOS_ID]) == "whole"
