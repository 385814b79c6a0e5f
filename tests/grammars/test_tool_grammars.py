"""Grammars of tool calls in every format: what they allow, the worker reads as calls that fit."""

import json
import re
from collections.abc import Mapping
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import msgspec
import pytest

from contract.events import ToolCallDelta
from contract.output_formats import ToolFormat
from gateway.grammars.compiled import GrammarRefused, Kind, compile_grammar
from gateway.grammars.rules.arguments import string_parameters
from tests.grammars.walks import draw, judge
from tests.marked_tokenizer import MarkedModel
from workers.output.formats import REASONING_FORMATS, TOOL_FORMATS
from workers.output.parser import OutputParser

MARK = re.compile(r"""</?[|｜]?[\w▁.:|｜-]+[|｜]?>|<\|"\|>|\[/?[A-Z_]{3,}\]|｜DSML｜""")
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "note": {"type": "string", "maxLength": 4},
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["it's", 'a "b" <c>', "<think>"]},
        "level": {"enum": [1, None, True, "x", [1, "y"], {"a": 0.5}]},
        "deep": {"$ref": "#/$defs/deep"},
        "either": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "list": {"type": ["string", "null", "integer"]},
        "one": {
            "oneOf": [{"$ref": "#/$defs/text"}, {"type": "array", "items": {"type": "boolean"}}]
        },
        "all": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "days", "kind", "level", "deep", "either", "list", "one"],
    "additionalProperties": False,
    "$defs": {
        "text": {"type": "string", "maxLength": 5},
        "deep": {
            "type": "object",
            "properties": {
                "x": {"type": ["number", "null"], "minimum": 0, "maximum": 9},
                "more": {"type": "array", "items": {"$ref": "#/$defs/deep"}, "maxItems": 1},
            },
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "nothing": NOTHING, "any-thing": {"type": "object"}}
FUNCTIONS = [
    (number, name, schema, name != "any-thing")
    for number, (name, schema) in enumerate(SCHEMAS.items())
]
STRINGS = {name: string_parameters(schema) for name, schema in SCHEMAS.items()}
TOOLS = {name: tuple(found) for name, found in STRINGS.items()}
HARMONY = next(each for each in REASONING_FORMATS if each.is_harmony)
NAMES = [f"{each.name}-{number}" for number, each in enumerate(TOOL_FORMATS)]
FORMATS = pytest.mark.parametrize("format_", TOOL_FORMATS, ids=NAMES)
SPELLED = pytest.mark.parametrize("are_tokens", [True, False], ids=["tokens", "text"])


def model_of(format_: ToolFormat, *, are_tokens: bool) -> MarkedModel:
    reasoning = HARMONY if format_.name == "openai" else None
    fields = [msgspec.structs.astuple(each) for each in (format_, reasoning) if each is not None]
    text = "\n".join(value for each in fields for value in each if isinstance(value, str))
    marks = dict.fromkeys(MARK.findall(text + '<|"|>')) if are_tokens else ()
    return MarkedModel(marks, reasoning, format_)


def grammar_of(model: MarkedModel, *, functions: Any = FUNCTIONS, **fields: Any) -> str:
    format_ = model.files.tool_format
    assert format_ is not None
    calls = {
        "format": msgspec.structs.asdict(format_),
        "is_bare": format_.is_bare,
        "functions": functions,
        "is_forced": True,
        "may_repeat": True,
        **fields,
    }
    return compile_grammar(Kind.TOOLS, calls, True, model.around("none"))


def read(model: MarkedModel, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The content and the calls that the worker finds; raises for arguments that are no JSON."""
    prompt = "<|start|>assistant" if model.files.reasoning else ""
    parser = OutputParser(model.files.tool_format, model.files.reasoning, prompt, TOOLS, STRINGS)
    delta = parser.push(text)
    delta.extend(parser.finish())
    return delta.content, _calls(delta.tool_calls)


def _calls(deltas: list[ToolCallDelta]) -> list[tuple[str, Any]]:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in deltas:
        names.setdefault(delta.index, delta.name)
        arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    return [(names[index], json.loads(text)) for index, text in arguments.items()]


def check(calls: list[tuple[str, Any]], schemas: Mapping[str, Any] = SCHEMAS) -> None:
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])


@FORMATS
@SPELLED
@pytest.mark.each_value
def test_forced_calls_are_read_and_fit(format_: ToolFormat, are_tokens: bool) -> None:
    """Whatever the model draws: nothing but calls, of the functions, with arguments that fit."""
    model = model_of(format_, are_tokens=are_tokens)
    grammar = grammar_of(model)
    num_whole = 0
    for seed in range(6):
        output = draw(model.grammars, grammar, seed)
        if output is None:
            continue
        num_whole += 1
        content, calls = read(model, model.text(output))
        assert (content, bool(calls)) == ("", True), model.text(output)
        check(calls)
    assert num_whole


CITY = {"type": "string", "minLength": 2}
SHOWN = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer"}, "wet": {"type": "boolean"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SHOWN_FUNCTIONS = [(0, "weather", SHOWN, True)]
PARIS = {"city": "Paris <b>", "days": 2}
ROME = {"city": "Rome", "days": 3, "wet": True}


def shown(format_: ToolFormat, *calls: dict[str, Any]) -> str:
    """Calls of `weather` as chat templates render them."""
    parts = [_shown(format_, arguments) for arguments in calls]
    if format_.syntax == "python":
        return f"{format_.begin}[{', '.join(parts)}]{format_.end}"
    between = format_.close + (format_.between or "") + format_.open
    text = format_.begin + format_.open + between.join(parts) + format_.close + format_.end
    return text.replace("{id}", "callnum01"[: format_.id_length or 9])


def _shown(format_: ToolFormat, arguments: dict[str, Any]) -> str:
    match format_.syntax:
        case "object":
            fields = {format_.name_key: "weather", format_.arguments_key: arguments}
            own = {format_.id_key: "{id}"} if format_.id_key else {}
            return json.dumps({**own, **fields} if format_.id_first else {**fields, **own})
        case "python":
            return f"weather({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        case "gemma":
            values = {key: json.dumps(value) for key, value in arguments.items()}
            text = ",".join(f"{key}:{value}" for key, value in values.items())
            return f"weather{{{text}}}".replace('"', '<|"|>')
        case "tags":
            text = "".join(_tag(format_, key, value) for key, value in arguments.items())
        case _:
            text = json.dumps(arguments)
    return f"weather{format_.middle}{text}"


def _tag(format_: ToolFormat, key: str, value: Any) -> str:
    is_string = isinstance(value, str)
    type_ = "string" if is_string else "number" if value in (2, 3) else "boolean"
    if "string=" in format_.key_close:
        type_ = str(is_string).lower()
    close = format_.key_close.replace("{type}", type_)
    text = value if is_string else json.dumps(value)
    return f"{format_.key_open}{key}{close}{text}{format_.value_close}"


@FORMATS
@SPELLED
@pytest.mark.each_value
def test_calls_may_be_written_as_the_template_shows_them(
    format_: ToolFormat, are_tokens: bool
) -> None:
    """One call or several; forced ones and ones that the model chose to make."""
    model = model_of(format_, are_tokens=are_tokens)
    one, two = (shown(format_, *calls) for calls in ([PARIS], [PARIS, ROME]))
    for is_forced in (True, False):
        for may_repeat in (True, False):
            grammar = grammar_of(
                model, functions=SHOWN_FUNCTIONS, is_forced=is_forced, may_repeat=may_repeat
            )
            assert judge(model.grammars, grammar, model.ids(one)) == "whole", one
            takes_two = judge(model.grammars, grammar, model.ids(two)) == "whole"
            assert takes_two == (may_repeat and format_.between is not None), two


@FORMATS
@SPELLED
@pytest.mark.each_value
def test_a_wrong_call_is_refused(format_: ToolFormat, are_tokens: bool) -> None:
    """Of another function, without a required argument, with a wrong one or one too many; also
    where the model need not call: then text may not begin a call."""
    model = model_of(format_, are_tokens=are_tokens)
    right = shown(format_, PARIS)
    wrong = [
        right.replace("weather", "whether"),
        right.replace("days", "daze"),
        right.replace("Paris <b>", "P"),
        shown(format_, {"city": "Paris"}),
        shown(format_, {**PARIS, "more": True}),
        shown(format_, {"days": 2, "city": "Paris"}),
    ]
    for is_forced in (True, False):
        grammar = grammar_of(model, functions=SHOWN_FUNCTIONS, is_forced=is_forced)
        taken = [
            text for text in wrong if judge(model.grammars, grammar, model.ids(text)) == "whole"
        ]
        assert taken == []


@FORMATS
@SPELLED
@pytest.mark.each_value
def test_text_is_allowed_where_no_call_is_forced(format_: ToolFormat, are_tokens: bool) -> None:
    """Alone, and before calls if the format marks them; the worker reads both."""
    model = model_of(format_, are_tokens=are_tokens)
    grammar = grammar_of(model, functions=SHOWN_FUNCTIONS, is_forced=False)
    forced = grammar_of(model, functions=SHOWN_FUNCTIONS)
    answer = "It rains <b> in\n\nRome."
    if model.files.reasoning is not None:
        answer = f"{model.files.reasoning.before_first_answer}{answer}"
    assert judge(model.grammars, grammar, model.ids(answer)) == "whole"
    assert judge(model.grammars, forced, model.ids(answer)).startswith("refused")
    text = answer + shown(format_, PARIS)
    is_whole = judge(model.grammars, grammar, model.ids(text)) == "whole"
    if not format_.is_bare and model.files.reasoning is None:
        assert is_whole
        assert read(model, text) == ("It rains <b> in\n\nRome.", [("weather", PARIS)])


@FORMATS
@SPELLED
@pytest.mark.each_value
def test_beside_a_response_format_the_model_calls_or_answers(
    format_: ToolFormat, are_tokens: bool
) -> None:
    """In the form of the answer, or by calls that fit, and in no third way."""
    model = model_of(format_, are_tokens=are_tokens)
    form = {"kind": "json_schema", "value": SHOWN, "is_strict": True}
    grammar = grammar_of(model, functions=SHOWN_FUNCTIONS, is_forced=False, answer=form)
    head = "" if model.files.reasoning is None else model.files.reasoning.before_first_answer
    answer, calls = json.dumps(PARIS), shown(format_, PARIS)
    for text, is_whole in [
        *((head + answer, True), (calls, True), (head + '{"city": "Rome"}', False)),
        *((f"{head}So: {answer}", False), (f"{head}So: {calls}", False), (answer + calls, False)),
    ]:
        assert (judge(model.grammars, grammar, model.ids(text)) == "whole") is is_whole, text
    assert read(model, calls) == ("", [("weather", PARIS)])
    assert read(model, head + answer) == (answer, [])
    outputs = [draw(model.grammars, grammar, seed) for seed in range(4)]
    for output in filter(None, outputs):
        content, found = read(model, model.text(output))
        check([("weather", json.loads(content))] if content else found, {"weather": SHOWN})
        assert bool(content) != bool(found)


@pytest.mark.parametrize("keyword", ["pattern", "format"])
@pytest.mark.parametrize("syntax", ["tags", "gemma"])
def test_what_a_syntax_cannot_force_is_refused_by_its_path(syntax: str, keyword: str) -> None:
    """If the function is strict; otherwise it is dropped."""
    format_ = next(each for each in TOOL_FORMATS if each.syntax == syntax)
    model = model_of(format_, are_tokens=True)
    value = "[a-z]+" if keyword == "pattern" else "date"
    schema = {"type": "object", "properties": {"a": {"type": "string", keyword: value}}}
    with pytest.raises(GrammarRefused, match=f"{keyword} cannot be forced") as refused:
        grammar_of(model, functions=[(3, "f", schema, True)])
    assert ".".join(refused.value.path) == f"3.function.parameters.properties.a.{keyword}"
    assert grammar_of(model, functions=[(3, "f", schema, False)])


class Counted(dict[str, Any]):
    """Counts how often something in it is looked up."""

    num_reads = 0

    def get(self, *names: Any) -> Any:
        self.num_reads += 1
        return super().get(*names)


@pytest.mark.parametrize("end", [{"type": "string"}, {"type": "integer"}, {"$ref": "#/$defs/0"}])
def test_each_reference_of_a_function_is_followed_once(end: dict[str, Any]) -> None:
    """Thousands of parameters that refer to a chain of thousands of schemas."""
    number = 3_000
    chain = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(number)} | {str(number): end}
    names = {f"p{i}": {"$ref": f"#/$defs/{i % number}"} for i in range(2 * number)}
    schema = Counted({"type": "object", "properties": names, "$defs": chain})
    found = string_parameters(schema)
    assert set(found) == (names.keys() if end == {"type": "string"} else set())
    assert schema.num_reads < 2 * number
