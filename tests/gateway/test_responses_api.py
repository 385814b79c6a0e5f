"""POST /v1/responses with the official client: answers, streams, tools, and what is refused."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from contract.events import ChoiceDelta, Tokens, ToolCallDelta
from contract.functions import Functions
from contract.jobs import FinishReason, Job
from tests.fakes import output_text
from tests.fleet import until
from tests.gateway.conftest import Gateways, error_of
from tests.gateway.fake_worker import MODEL, FakeWorker, says
from tests.gateway.test_structured import accepts
from tests.workers.output.reading import split, tool_format
from workers.output.parser import OutputParser

pytestmark = pytest.mark.anyio

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
NAMED: Any = {"type": "function", "name": "add"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}
BODY: dict[str, Any] = {"model": MODEL, "input": "Hi"}


@pytest.fixture
async def client(gateway_url: str, http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{gateway_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def thinks_and_calls(_: Job) -> list[Tokens]:
    """Reasoning, a text, and two calls; a token for each part."""
    parts: list[dict[str, Any]] = [
        {"reasoning": "Two "},
        {"reasoning": "numbers."},
        {"text": "I add"},
        {"text": " them."},
        {"tool_calls": (ToolCallDelta(0, "add", '{"a": '),)},
        {"tool_calls": (ToolCallDelta(0, "", "1}"), ToolCallDelta(1, "add", '{"a": 2}'))},
    ]
    script = []
    for start, part in enumerate(parts):
        fields: dict[str, Any] = {"text": "", **part}
        fields["finish_reason"] = FinishReason.TOOL_CALLS if start == len(parts) - 1 else None
        fields["num_reasoning"] = int("reasoning" in part)
        script.append(Tokens((ChoiceDelta(0, start, (97,), **fields),)))
    return script


async def test_a_string_is_answered(client: AsyncOpenAI, worker: FakeWorker) -> None:
    """The response has the text, its usage, and the parameters of the request."""
    response = await client.responses.create(
        model=MODEL, input="Hi", instructions="Be kind.", metadata={"a": "b"}
    )

    job = worker.seen[0]
    assert output_text(job.prompt_ids) == "system: Be kind.\nuser: Hi\nassistant: "
    assert response.id == "resp_" + job.id.removeprefix("job-")
    assert (response.output_text, response.status) == ("Hello wörld!", "completed")
    assert response.completed_at is not None
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.input_tokens == len(job.prompt_ids)
    assert await client.responses.retrieve(response.id) == response


async def test_the_stream_accumulates_to_the_response(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    """With reasoning, text and calls; sequence numbers have no gap."""
    worker.script = thinks_and_calls

    async with client.responses.stream(model=MODEL, input="Hi", tools=[TOOL]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()

    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [item.type for item in final.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert final.output_text == "I add them."
    calls = [item.arguments for item in final.output if item.type == "function_call"]
    assert calls == ['{"a": 1}', '{"a": 2}']
    assert final.usage is not None
    assert final.usage.output_tokens_details.reasoning_tokens == 2
    kept = await client.responses.retrieve(final.id)
    assert [item.to_dict() for item in kept.output] == [
        event.item.to_dict() for event in events if event.type == "response.output_item.done"
    ]
    last = events[-1]
    assert last.type == "response.completed"
    assert kept.output_text == "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )


@pytest.mark.parametrize("seed", range(8))
async def test_a_call_is_one_item_wherever_its_text_is_cut(
    client: AsyncOpenAI, worker: FakeWorker, seed: int
) -> None:
    """An event may end a call and go on with content, or with another call."""
    chance = random.Random(seed)
    calls = [{"name": "add", "arguments": {"a": a}} for a in range(2)]
    marked = "\n".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    says = f"I add. {marked}\nDone."

    def script(_: Job) -> list[Tokens]:
        parser = OutputParser(tool_format("hermes"), None, "", {"add": ("a",)})
        parts = [parser.push(part) for part in split(says, chance.choices(range(200), k=6))]
        parts.append(parser.finish())
        deltas = [
            ChoiceDelta(0, start, (97,), part.content, tool_calls=tuple(part.tool_calls))
            for start, part in enumerate(parts)
        ]
        deltas[-1] = msgspec.structs.replace(deltas[-1], finish_reason=FinishReason.TOOL_CALLS)
        return [Tokens((delta,)) for delta in deltas]

    worker.script = script
    async with client.responses.stream(model=MODEL, input="Hi", tools=[TOOL]) as stream:
        final = await stream.get_final_response()

    found = [item.arguments for item in final.output if item.type == "function_call"]
    assert found == ['{"a": 0}', '{"a": 1}']
    assert final.output_text == "I add.\nDone."


async def test_a_tool_round_trip(client: AsyncOpenAI, worker: FakeWorker) -> None:
    """The output of a response is the input of the next, with the results of its calls."""
    worker.script = thinks_and_calls
    asked = await client.responses.create(model=MODEL, input="Hi", tools=[TOOL])
    assert worker.seen[0].tools
    calls = [item for item in asked.output if item.type == "function_call"]
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": str(number)}
        for number, call in enumerate(calls, 3)
    ]
    worker.script = says("7")

    given: Any = [{"role": "user", "content": "Hi"}, *asked.output, *results]
    by_items = await client.responses.create(model=MODEL, input=given, tools=[TOOL])
    by_id = await client.responses.create(
        model=MODEL, input=results, tools=[TOOL], previous_response_id=asked.id
    )

    assert by_items.output_text == by_id.output_text == "7"
    assert worker.seen[1].prompt_ids == worker.seen[2].prompt_ids
    prompt = output_text(worker.seen[1].prompt_ids)
    assert "I add them." in prompt
    assert prompt.endswith("tool: 3\ntool: 4\nassistant: ")


async def test_calls_can_be_forced(http: httpx.AsyncClient, idle_worker: FakeWorker) -> None:
    """By `tool_choice` and by strict functions, with the grammar of a chat's tools."""
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}
    for fields in ({"tool_choice": choice} for choice in ("required", NAMED, allowed)):
        body = {**BODY, "background": True, "tools": [TOOL], **fields}
        answer = await http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        grammar = (await idle_worker.claim()).job.params.grammar
        assert accepts(grammar, '<call>{"name": "add", "arguments": {"a": 1}}</call>')
        assert not accepts(grammar, "Hi")
        assert answer.json()["tool_choice"] == fields["tool_choice"]


class Sum(BaseModel):
    value: int


async def test_an_output_is_parsed_by_its_schema(client: AsyncOpenAI, worker: FakeWorker) -> None:
    """`responses.parse` of the client, whose schema becomes the job's grammar."""
    worker.script = says('{"value":', " 85}")

    response = await client.responses.parse(model=MODEL, input="Hi", text_format=Sum)

    assert response.output_parsed == Sum(value=85)
    assert accepts(worker.seen[0].params.grammar, '{"value": 1}')
    assert not accepts(worker.seen[0].params.grammar, "Hi")


FORMAT = {"type": "json_schema", "name": "sum", "schema": PARAMETERS}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"description": None, "strict": None},
        {"description": "A sum.", "strict": False},
        {"strict": True},
    ],
)
async def test_a_format_of_a_schema_is_shown_with_all_its_members(
    http: httpx.AsyncClient, worker: FakeWorker, given: dict[str, Any]
) -> None:
    """Open Responses requires them of a response, not of a request."""
    worker.script = says("{}")
    answer = await http.post("/v1/responses", json=BODY | {"text": {"format": FORMAT | given}})
    described = {"description": given.get("description"), "strict": bool(given.get("strict"))}
    assert answer.json()["text"] == {"format": FORMAT | described}


async def test_what_a_model_declined_is_read_as_its_text(
    client: AsyncOpenAI, http: httpx.AsyncClient, worker: FakeWorker
) -> None:
    """Alone and beside other text; among the items it stays what it was."""
    refused = {"type": "refusal", "refusal": "I cannot."}
    said: dict[str, Any] = {"type": "output_text", "text": "Well."}
    shown = said | {"annotations": [], "logprobs": []}
    for given, kept, text in (
        ([refused], [refused], "I cannot."),
        ([said, refused], [shown, refused], "Well.\nI cannot."),
    ):
        declined = {"role": "assistant", "content": given}
        body = BODY | {"input": [declined, {"role": "user", "content": "Why?"}]}
        response = (await http.post("/v1/responses", json=body)).json()
        await client.responses.create(
            model=MODEL, input="Go on.", previous_response_id=response["id"]
        )
        turns = f"assistant: {text}\nuser: Why?\nassistant: "
        assert output_text(worker.seen[-2].prompt_ids) == turns
        assert output_text(worker.seen[-1].prompt_ids).startswith(turns)
        items = await http.get(f"/v1/responses/{response['id']}/input_items?order=asc")
        assert items.json()["data"][0]["content"] == kept


async def test_log_probabilities_are_those_of_the_text(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    """In the output, and in the events of its text, each once: a part begins without them."""
    fields: Any = {"top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True, **fields)
    events: dict[str, list[Any]] = {}
    async for event in stream:
        events.setdefault(event.type, []).append(event)

    [added] = events["response.content_part.added"]
    assert (added.part.text, added.part.logprobs) == ("", [])
    [done] = events["response.content_part.done"]
    deltas = events["response.output_text.delta"]
    told = [logprob.token for delta in deltas for logprob in delta.logprobs]
    assert told == [logprob.token for logprob in done.part.logprobs]
    response = await client.responses.create(model=MODEL, input="Hi", **fields)
    part = response.output[0].content[0]
    assert part.type == "output_text"
    assert [logprob.token for logprob in part.logprobs or ()] == told
    assert "".join(told).startswith("Hello w")
    assert {len(logprob.top_logprobs) for logprob in part.logprobs or ()} == {1}


async def test_a_cut_output_is_incomplete(client: AsyncOpenAI, worker: FakeWorker) -> None:
    """Whole and as a stream, with the reason."""
    worker.script = says("He", finish=FinishReason.LENGTH)
    stream = await client.responses.create(
        model=MODEL, input="Hi", max_output_tokens=2, stream=True
    )
    *_, last = [event async for event in stream]

    assert last.type == "response.incomplete"
    kept = await client.responses.retrieve(last.response.id)
    assert kept == last.response
    assert kept.incomplete_details is not None
    assert kept.incomplete_details.reason == "max_output_tokens"
    assert kept.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert worker.seen[0].params.max_tokens == 2


async def test_a_failed_job_is_an_error(client: AsyncOpenAI, idle_worker: FakeWorker) -> None:
    """Of a whole call an HTTP error, of a stream its last event, and of what is kept its status."""

    async def fail() -> None:
        await idle_worker.finish(await idle_worker.claim(), 1, "engine_error", "it broke")

    failing = asyncio.create_task(fail())
    with pytest.raises(openai.InternalServerError) as raised:
        await client.responses.create(model=MODEL, input="Hi")
    await failing
    failing = asyncio.create_task(fail())
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
    *_, last = [event async for event in stream]
    await failing

    assert raised.value.code == "engine_error"
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "it broke"
    assert await client.responses.retrieve(last.response.id) == last.response


@pytest.mark.parametrize("leaves", [None, False, True], ids=["whole", "stream", "leaves"])
async def test_nothing_is_kept_of_a_call_that_is_not_stored(
    http: httpx.AsyncClient, idle_worker: FakeWorker, functions: Functions, leaves: bool | None
) -> None:
    """Neither a response nor its job, which is cancelled first if its caller leaves."""
    body = {**BODY, "store": False, "stream": leaves is not None}
    call = asyncio.create_task(http.post("/v1/responses", json=body))
    claimed = await idle_worker.claim()
    if leaves:
        call.cancel()
    else:
        await idle_worker.run(claimed)
        assert (await call).status_code == 200
    job = claimed.job

    async def is_gone() -> bool:
        return await functions.read(job.id, job.tenant) is None

    await until(is_gone)
    id_ = "resp_" + job.id.removeprefix("job-")
    assert (await http.get(f"/v1/responses/{id_}")).status_code == 404


async def test_a_caller_may_leave_at_the_last_event(
    gateways: Gateways, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """As Codex does: what is not stored is forgotten by then, and no warning says that it is."""
    async with gateways() as http:
        for _ in range(12):
            body = {**BODY, "store": False, "stream": True}
            async with http.stream("POST", "/v1/responses", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line == "event: response.completed":
                        break
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == []


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "unsupported_parameter", "prompt"),
    ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
    ({"reasoning": {"effort": "high"}}, "unsupported_parameter", "reasoning.effort"),
    ({"text": {"verbosity": "low"}}, "unsupported_parameter", "text.verbosity"),
    ({"tools": [{}]}, "missing_required_parameter", "tools.0.name"),
    ({"tool_choice": {"type": "mcp"}}, "unsupported_parameter", "tool_choice.type"),
    ({"tool_choice": ALLOWED}, "invalid_value", "tool_choice.tools.0.name"),
    ({"background": True, "store": False}, "invalid_value", "store"),
    ({"input": []}, "invalid_value", "input"),
    ({"input": [{"type": "computer_call"}]}, "unsupported_parameter", "input.0.type"),
    ({"input": [{"type": "cat"}]}, "invalid_value", "input.0.type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "invalid_value",
        "input.0.content.0",
    ),
    (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]}
            ]
        },
        "invalid_value",
        "input.0.content.0",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "unsupported_parameter",
        "input.0.content.0.type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "unsupported_parameter",
        "input.0.content.0.type",
    ),
    ({"input": [{"id": "msg_1"}]}, "item_not_found", "input.0.id"),
    ({"previous_response_id": "resp_1"}, "previous_response_not_found", "previous_response_id"),
    (
        {"previous_response_id": "resp_0-" + "0" * 32},
        "previous_response_not_found",
        "previous_response_id",
    ),
    ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
    ({"input": "x" * 600}, "context_length_exceeded", "input"),
    ({"text": {"format": {"type": "json_schema"}}}, "invalid_value", "text.format.name"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "cat"}}}},
        "invalid_value",
        "text.format.schema",
    ),
    ({"tools": [TOOL, TOOL]}, "invalid_value", "tools"),
    ({"tool_choice": NAMED}, "invalid_value", "tool_choice.name"),
    ({"top_k": 1}, "unsupported_parameter", "top_k"),
    ({"top_kk": 1}, "unknown_parameter", "top_kk"),
    ({"model": "none"}, "model_not_found", "model"),
]


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_done_is_refused_by_name(
    http: httpx.AsyncClient, idle_worker: FakeWorker, case: tuple[dict[str, Any], str, str]
) -> None:
    """404 for what is not there, else 400; the message names the parameter of this API. As a job's
    body with its place in it."""
    fields, code, param = case
    body = {**BODY, **fields}
    answer = await http.post("/v1/responses", json=body)
    status = 404 if "not_found" in code else 400
    assert error_of(answer) == (status, param, code)
    error = answer.json()["error"]
    if "background" not in fields:
        as_job = await http.post("/v1/jobs", json={"endpoint": "/v1/responses", "body": body})
        assert error_of(as_job)[1:] == (f"body.{param}", code)
    of_chats = ("messages", "max_completion_tokens", "response_format")
    assert [name for name in of_chats if name in error["message"]] == []


async def test_input_tokens_are_counted_without_a_job(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    """The count is that of a call with the same body."""
    counted = await client.responses.input_tokens.count(model=MODEL, input="Hi", tools=[TOOL])
    assert worker.seen == []

    response = await client.responses.create(model=MODEL, input="Hi", tools=[TOOL])
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens


async def test_input_tokens_of_an_earlier_response_need_no_input(
    client: AsyncOpenAI, http: httpx.AsyncClient, worker: FakeWorker
) -> None:
    """They are fewer than with more input; without either there is nothing to count."""
    first = await client.responses.create(model=MODEL, input="Hi")
    chain: Any = {"model": MODEL, "previous_response_id": first.id}
    alone = await client.responses.input_tokens.count(**chain)
    more = await client.responses.input_tokens.count(**chain, input="More")
    assert first.usage is not None
    assert first.usage.input_tokens < alone.input_tokens < more.input_tokens
    answer = await http.post("/v1/responses/input_tokens", json={"model": MODEL})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
