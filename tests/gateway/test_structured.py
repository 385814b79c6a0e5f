"""Parameters that constrain the output become a grammar of the job."""

from typing import Any

import httpx
import pytest

from gateway.child_process import ChildLimits
from gateway.grammars.compiler import Constraint, GrammarCompiler
from gateway.http.errors import ApiError
from tests.fakes import encode_text, hash_grammars
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON_OBJECT = '{"b": [1, null]}'


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", **fields}}


# Fields of a chat, an output that they accept, and one that they refuse.
Case = tuple[dict[str, Any], str, str]
CONSTRAINTS: list[Case] = [
    ({"response_format": json_schema(schema=SCHEMA, strict=True)}, '{"a": 12}', '{"b": 1}'),
    ({"response_format": json_schema(schema=SCHEMA)}, '{"a": 12}', "12"),
    ({"response_format": json_schema(schema={})}, "[]", "{]"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a": 12}', "{}"),
    ({"response_format": {"type": "json_object"}}, JSON_OBJECT, "[]"),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}', '{"a": "1"}'),
    ({"structured_outputs": {"json": '{"type": "integer"}'}}, "-3", "true"),
    ({"structured_outputs": {"json_object": True}}, JSON_OBJECT, "1"),
    ({"structured_outputs": {"regex": "[ab]+"}}, "abba", "c"),
    ({"structured_outputs": {"choice": ["yes", 'n"o']}}, 'n"o', "maybe"),
    ({"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}}, "aab", "aba"),
    ({"guided_json": SCHEMA}, '{"a": 1}', "{}"),
    ({"guided_regex": "[0-9]{3}"}, "123", "12a"),
    ({"guided_choice": ["yes", "no"]}, "no", "n0"),
    ({"guided_grammar": 'start: "x" /[0-9]/'}, "x7", "7x"),
]


@pytest.mark.parametrize("case", CONSTRAINTS)
async def test_a_job_carries_the_grammar(
    http: httpx.AsyncClient, idle_worker: FakeWorker, case: Case
) -> None:
    """The worker gets one that accepts what it should, and nothing else."""
    fields, accepted, refused = case
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    endpoint = "/v1/chat/completions"
    answer = await http.post("/v1/jobs", json={"endpoint": endpoint, "body": body})
    assert answer.status_code == 202, answer.text

    claimed = await idle_worker.claim()

    grammar = claimed.job.params.grammar
    assert accepts(grammar, accepted)
    assert not accepts(grammar, refused)


async def test_text_is_not_constrained(http: httpx.AsyncClient, idle_worker: FakeWorker) -> None:
    """`response_format` of type text has no effect."""
    body = {"model": MODEL, "prompt": "Hi", "response_format": {"type": "text"}}
    await http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": body})

    claimed = await idle_worker.claim()

    assert claimed.job.params.grammar == ""


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("x", "choice", [f"v{i}" for i in range(200_000)]),
        Constraint("x", "json_schema", {"enum": [f"v{i}" for i in range(300_000)]}),
    ],
    ids=["alternatives", "enum"],
)
async def test_a_grammar_that_takes_too_long_costs_only_its_own_request(
    constraint: Constraint,
) -> None:
    """It is rejected by name, and the next one is compiled."""
    compiler = GrammarCompiler(ChildLimits(cpu_s=1, wall_s=20.0))
    try:
        with pytest.raises(ApiError) as refused:
            await compiler.compile(constraint)
        assert refused.value.param == "x"
        assert accepts(await compiler.compile(Constraint("y", "regex", "a")), "a")
    finally:
        await compiler.aclose()


def accepts(grammar: str, text: str) -> bool:
    """Whether the text is a whole output."""
    matcher = hash_grammars().matcher(grammar)
    return all(map(matcher.state.consume_token, encode_text(text))) and matcher.state.is_accepting()
