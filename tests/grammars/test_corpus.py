"""Schemas that people send are compiled, and their outputs run to an end and are valid; or they are
refused for a reason. None fails in a worker."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.grammars.compiled import GrammarRefused, Kind, compile_grammar
from tests.grammars.corpus import Case, published, pydantic_types, suite
from tests.grammars.schema_walks import outcome, walkers

INTEGER: dict[str, Any] = {"type": "integer"}


def closed(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, **fields}


def required(**properties: Any) -> dict[str, Any]:
    return closed(properties=properties, required=list(properties))


def optional(num: int, prefix: str = "p") -> dict[str, Any]:
    return closed(properties={f"{prefix}{i}": INTEGER for i in range(num)})


def counts_of(cases: Iterable[Case], is_strict: bool) -> Counter[str]:
    """Outcomes, by source; each case by one tokenizer, in turns."""
    found: Counter[str] = Counter()
    for number, case in enumerate(cases):
        walker = walkers()[number % len(walkers())]
        found[f"{case.source} {outcome(case, is_strict, walker, 1)}"] += 1
    return found


@pytest.mark.parametrize("is_strict", [True, False])
def test_some_schemas_that_people_send(is_strict: bool) -> None:
    cases = [*list(published())[::45], *pydantic_types()]
    cases += [case for case, _ in suite() if isinstance(case.schema, dict)][::60]

    found = counts_of(cases, is_strict)

    assert sum(num for name, num in found.items() if name.endswith(" ended")) > 0.7 * len(cases)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("is_strict", "every"),
    [
        (False, 4),
        *(pytest.param(is_strict, 1, marks=pytest.mark.long) for is_strict in (True, False)),
    ],
)
def test_all_schemas_that_people_send(is_strict: bool, every: int) -> None:
    """The table is in docs/decisions/structured-output.md."""
    cases = [*published(), *pydantic_types()]
    cases += [case for case, _ in suite() if isinstance(case.schema, dict)]
    cases = cases[::every]

    found = counts_of(cases, is_strict)

    print(is_strict, dict(sorted(found.items())))
    few = {name: num for name, num in found.items() if name.endswith((" long", " refused"))}
    assert sum(few.values()) < (0.25 if is_strict else 0.05) * len(cases), few


HARD: dict[str, Any] = {
    "a pattern of a property's name": closed(
        properties={"s": {"type": "string", "maxLength": 3}},
        patternProperties={"^s$": {"type": "string"}},
        required=["s"],
    ),
    "a pattern of all names": closed(
        properties={"a": INTEGER, "b": INTEGER},
        patternProperties={"^[ab]$": {"minimum": 1}},
        required=["a"],
    ),
    "an end among endless values": {
        "anyOf": [required(x={"$ref": "#"}), {"type": "null"}, required(y=INTEGER)]
    },
    "an optional endless value": closed(properties={"x": {"$ref": "#/$defs/e"}, "y": INTEGER})
    | {"$defs": {"e": required(e={"$ref": "#/$defs/e"})}},
    "an endless value that may be null": required(
        next={"allOf": [{"$ref": "#"}], "nullable": True}
    ),
    "five hundred optional properties": optional(490),
    "nested lists": {"type": "array", "items": {"$ref": "#"}, "maxItems": 3},
    "a long string": {"type": "string", "maxLength": 100_000},
    "many items": {"type": "array", "items": INTEGER, "maxItems": 10**12},
    "small steps": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1},
    "names in a map": {
        "type": "object",
        "additionalProperties": INTEGER,
        "propertyNames": {"enum": ["a", "b"]},
    },
}
HOPELESS: dict[str, tuple[Any, str]] = {
    "itself": ({"$ref": "#"}, ""),
    "a loop": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "$defs.b",
    ),
    "endless": (required(x=required(c={"$ref": "#/properties/x"})), "properties.x.properties.c"),
    "endless lists": ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "items"),
    "a thousand optional properties": (required(x=optional(1000)), "properties.x"),
    "thirty by thirty": (
        required(x={"oneOf": [optional(30, f"a{i}_") for i in range(30)]}),
        "properties.x",
    ),
    "repetitions": (required(x={"type": "string", "pattern": "^a{1000000}$"}), "properties.x"),
    "a million items": (required(x={"type": "array", "minItems": 10**6}), "properties.x"),
    "another type": (required(x={"type": "string", "enum": [1]}), "properties.x"),
    "both types": ({"allOf": [{"type": "string"}, INTEGER]}, ""),
    "nothing": (required(x={"anyOf": []}), "properties.x"),
    "lengths": (required(x={"type": "string", "minLength": 2, "maxLength": 1}), "properties.x"),
    "false": (required(x=False), ""),
    "nothing by reference": (
        required(x={"$ref": "#/$defs/n"}) | {"$defs": {"n": {"type": "string", "const": 1}}},
        "$defs.n",
    ),
    "no items": (required(x={"type": "array", "minItems": 1, "items": False}), "properties.x"),
    "a reference": (required(x={"$ref": "#/$defs/none"}), "properties.x"),
    "a list": (closed(properties=[]), ""),
}


@pytest.mark.parametrize("schema", HARD.values(), ids=HARD.keys())
def test_hard_schemas_run_to_an_end(schema: Any) -> None:
    for number, walker in enumerate(walkers()):
        assert outcome(Case("hard", str(number), schema), True, walker, 8) == "ended"


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize(("schema", "path"), HOPELESS.values(), ids=HOPELESS.keys())
def test_what_has_no_output_is_refused_by_its_place(
    schema: Any, path: str, is_strict: bool
) -> None:
    if not is_strict and "pattern" in str(schema):
        return  # it is dropped
    with pytest.raises(GrammarRefused) as refused:
        compile_grammar(Kind.JSON_SCHEMA, schema, is_strict)

    assert ".".join(refused.value.path) == path


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Kind.REGEX, "a{1000000}"),
        (Kind.REGEX, r"[^\x00-\U0010ffff]"),
        (Kind.GRAMMAR, "start: start"),
        (Kind.GRAMMAR, "start: a\na: b\nb: a"),
        (Kind.GRAMMAR, 'start: "a" start'),
        (Kind.GRAMMAR, "root ::= root"),
        (Kind.GRAMMAR, 'start: "a"{1000000}'),
        (Kind.GRAMMAR, 'start: %json {"$ref": "#"}'),
        (Kind.GRAMMAR, "start: " + " | ".join(f'"v{i}"' for i in range(3_000))),
    ],
)
def test_grammars_whose_outputs_cannot_go_on_are_refused(kind: Kind, value: str) -> None:
    with pytest.raises(GrammarRefused):
        compile_grammar(kind, value)


NUMBERS = st.one_of(
    st.integers(-20, 20),
    st.integers(-(2**64), 2**64),
    st.floats(-5, 5).map(lambda number: round(number, 3)),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, -0.0, 0.5, -0.5, 1e-9, 1e-20, 2**53 + 1, -(2**63), 2**63 - 1, 3.4e38]),
)
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


@settings(max_examples=120, deadline=None)
@given(
    type_=st.sampled_from(["number", "integer"]),
    bounds=st.dictionaries(st.sampled_from(BOUNDS), NUMBERS, max_size=3),
    step=st.sampled_from([None, 1, 2, 7, 0.5, 0.01, 2.5, 1000]),
)
def test_numbers_are_within_their_bounds(
    type_: str, bounds: dict[str, Any], step: float | None
) -> None:
    """Apart, and where another schema adds the half of them."""
    step_of = {} if step is None else {"multipleOf": step}
    first = dict(list(bounds.items())[:1])
    apart = {"type": type_, **bounds, **step_of}
    joined = {"allOf": [{"type": type_, **first}, {**bounds, **step_of}]}
    for schema in (apart, joined):
        outcome(Case("numbers", "", schema), True, walkers()[0], 4)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"items": [{}, {"not": {}}]}, "items.1"),
        ({"items": [{}], "additionalItems": {"not": {}}}, "additionalItems"),
        (
            {"properties": {"a": {"items": [{"contains": {"type": "null"}}]}}},
            "properties.a.items.0",
        ),
        ({"unevaluatedProperties": {"not": {}}}, "unevaluatedProperties"),
        ({"unevaluatedItems": {"if": {}}}, "unevaluatedItems"),
        ({"prefixItems": [{}, {"not": {}}]}, "prefixItems.1"),
        ({"oneOf": [{"type": "null"}, {"type": "string", "if": {}}]}, "oneOf.1"),
    ],
)
def test_a_refusal_names_the_place_as_the_caller_wrote_it(schema: Any, path: str) -> None:
    """Not as a later draft names it."""
    with pytest.raises(GrammarRefused) as refused:
        compile_grammar(Kind.JSON_SCHEMA, schema, True)
    assert ".".join(refused.value.path).startswith(path)
