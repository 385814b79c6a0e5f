"""Anthropic's POST /v1/messages and its count of tokens: the chats that they ask for, their answers
and events, and what is refused."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batchway_client.events import Parser
from contract.events import ChoiceDelta, LogEntry, Tokens, ToolCallDelta
from contract.functions import Functions
from contract.jobs import FinishReason
from contract.keys import Keys
from contract.model_cards import Capabilities
from gateway.follow.message_events import MessageEvents
from gateway.prepare.messages import MessagesBody
from tests.fakes import hash_tokenizer, output_text
from tests.gateway.conftest import Bearer, Gateways, error_of, until_listed
from tests.gateway.fake_worker import (
    CONTEXT_LENGTH,
    MODEL,
    FakeWorker,
    job_of_one,
    publish_model,
    says,
)
from tests.gateway.test_thinking import THINK, Published, published  # noqa: F401

pytestmark = pytest.mark.anyio

HI: list[Any] = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "messages": HI}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
Event = Mapping[str, Any]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content} | fields


def blocks(role: str, *given: Any) -> dict[str, Any]:
    return {"role": role, "content": [*given]}


def chat_of(**fields: Any) -> dict[str, Any]:
    body = MessagesBody.model_validate(BODY | fields)
    return body.chat().model_dump(exclude_none=True, exclude_defaults=True)


def events_in(answer: httpx.Response | str) -> list[Event]:
    """The events of a stream. Each is named as its type."""
    given = answer if isinstance(answer, str) else answer.text
    found = list(Parser().feed(given.encode()))
    assert [event.type for event in found] == [event.data["type"] for event in found]
    return [event.data for event in found]


def accumulated(events: Sequence[Event]) -> dict[str, Any]:
    """The message of a stream, as Anthropic's clients put it together."""
    first, *events = [dict(event) for event in events if event["type"] != "ping"]
    *events, delta, last = events
    assert (first["type"], last) == ("message_start", {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
            arguments = ""
            continue
        assert event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        match event.get("delta"):
            case {"type": "text_delta", "text": more}:
                block["text"] += more
            case {"type": "thinking_delta", "thinking": more}:
                block["thinking"] += more
            case {"type": "signature_delta", "signature": signature}:
                block["signature"] = signature
            case {"type": "input_json_delta", "partial_json": more}:
                arguments += more
            case other:
                assert (event["type"], other) == ("content_block_stop", None)
                if arguments:
                    block["input"] = json.loads(arguments)
    assert delta["type"] == "message_delta"
    return {**message, **delta["delta"], "usage": delta["usage"]}


# A part of an output: reasoning, text, or a call of two.
PARTS = st.one_of(
    st.tuples(st.sampled_from(("reasoning", "text")), st.text(min_size=1, max_size=8)),
    st.tuples(st.just("call"), st.dictionaries(st.text(max_size=3), st.integers(), max_size=3)),
)


@settings(max_examples=50)
@given(st.lists(PARTS, max_size=6), st.data())
def test_a_stream_is_the_whole_message_however_it_is_cut_and_resumed(
    parts: list[tuple[str, Any]], data: st.DataObject
) -> None:
    """Reasoning, text and calls in any order, in deltas of any size, several in an event."""
    deltas, calls = list[dict[str, Any]](), 0
    for kind, value in parts:
        if kind != "call":
            deltas += [{kind: character} for character in value]
            continue
        deltas.append({"tool_calls": (ToolCallDelta(calls, "add", ""),)})
        deltas += [{"tool_calls": (ToolCallDelta(calls, "", c),)} for c in json.dumps(value)]
        calls += 1
    end = {"finish_reason": FinishReason.TOOL_CALLS if calls else FinishReason.STOP}
    found = [ChoiceDelta(0, 0, (), **({"text": ""} | delta)) for delta in [*deltas, end]]
    entries = list[LogEntry]()
    while found:
        size = data.draw(st.integers(1, 5))
        entries.append(LogEntry(len(entries) + 1, "", Tokens(tuple(found[:size]))))
        del found[:size]

    def events_after(number: int) -> Sequence[Event]:
        events = MessageEvents(job_of_one(), 64, True)
        for entry in entries[:number]:
            events.of(entry)
        return [e for entry in entries[number:] for e in events.of(entry)] + events.end(9, 2, 4)

    whole = events_after(0)
    message = MessageEvents(job_of_one(), 64, True)
    for entry in entries:
        message.of(entry)
    assert accumulated(json.loads(json.dumps(whole))) == message.build(9, 2, 4)
    rests = [events_after(number) for number in range(len(entries))]
    assert all(rest == whole[-len(rest) :] for rest in rests)
    kinds = {"reasoning": "thinking", "text": "text", "call": "tool_use"}
    wanted = [kinds[kind] for kind, _ in parts]
    joined = [
        k for k, last in zip(wanted, [None, *wanted], strict=False) if k != last or k == "tool_use"
    ]
    content = message.build(9, 2, 4)["content"]
    assert [block["type"] for block in content] == joined
    assert all(block["signature"] for block in content if block["type"] == "thinking")
    assert [b["input"] for b in content if b["type"] == "tool_use"] == [
        value for kind, value in parts if kind == "call"
    ]


async def test_a_message_is_answered(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    system = [{**text("Be kind."), "cache_control": {"type": "ephemeral"}}, text("Be brief.")]
    body = BODY | {"system": system}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x-2026-01-01"}
    answer = await http.post(
        "/v1/messages?beta=true", json=BODY | {"system": system}, headers=headers
    )

    [job] = worker.seen
    assert output_text(job.prompt_ids) == "system: Be kind.\nBe brief.\nuser: Hi\nassistant: "
    assert "x-ignored-parameters" not in answer.headers
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.json() == {
        "id": "msg_" + job.id.removeprefix("job-"),
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [text("Hello wörld!")],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(job.prompt_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 13,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    streamed = await http.post("/v1/messages", json=body | {"stream": True})
    assert accumulated(events_in(streamed)) | {"id": ""} == answer.json() | {"id": ""}


@pytest.mark.parametrize(
    ("script", "fields", "stop"),
    [
        (says("a", finish=FinishReason.LENGTH), {}, ("max_tokens", None)),
        (
            says("a", finish=FinishReason.LENGTH),
            {"max_tokens": CONTEXT_LENGTH},
            ("model_context_window_exceeded", None),
        ),
        (says("a"), {"stop_sequences": ["\n\n"]}, ("end_turn", None)),
        (
            lambda _: [Tokens((ChoiceDelta(0, 0, (97,), "a", FinishReason.STOP, stop="E"),))],
            {"stop_sequences": ["E"]},
            ("stop_sequence", "E"),
        ),
    ],
)
async def test_the_stop_reason_tells_why_it_ends(
    worker: FakeWorker, http: httpx.AsyncClient, script: Any, fields: Any, stop: Any
) -> None:
    worker.script = script
    for stream in (False, True):
        answer = await http.post("/v1/messages", json=BODY | fields | {"stream": stream})
        message = accumulated(events_in(answer)) if stream else answer.json()
        assert (message["stop_reason"], message["stop_sequence"]) == stop


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"messages": [blocks("user", text("a"), text("b")), HI[0]]}, [("user", "a\nb\nHi")]),
        ({"system": "S", "messages": [*HI, blocks("system", text("T"))]},
         [("system", "S"), ("user", "Hi"), ("system", "T")]),
        ({"messages": [*HI, blocks("assistant", USE), blocks("user", result("3"), text("go"))]},
         [("user", "Hi"), ("assistant", ""), ("tool", "3"), ("user", "go")]),
        ({"messages": [*HI, blocks("assistant", USE),
                       blocks("user", result([text("no"), text("file")], is_error=True))]},
         [("user", "Hi"), ("assistant", ""), ("tool", "Error:\nno\nfile")]),
        ({"messages": [blocks("user", result(None) | {"content": []})]}, [("tool", "")]),
    ],
)  # fmt: skip
def test_turns_become_messages_of_a_chat(fields: Any, messages: list[tuple[str, str]]) -> None:
    chat = MessagesBody.model_validate(BODY | fields).chat()
    assert [(message.role, message.text) for message in chat.messages] == messages


def test_images_stand_where_they_are_in_a_turn_and_in_results() -> None:
    """As data URLs or files; the type of a block tells which of its fields count."""
    file = {"type": "image", "source": {"type": "file", "file_id": "file-" + "0" * 32}}
    stray = text("b") | {"source": PNG["source"]}
    turns = [blocks("user", text("a"), PNG, stray), blocks("assistant", USE)]
    [first, _, last] = chat_of(messages=[*turns, blocks("user", result([file]))])["messages"]
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert first["content"] == [text("a"), url, text("b")]
    assert last["content"] == [{"type": "image_url", "image_url": {"file_id": "file-" + "0" * 32}}]


def test_blocks_of_an_assistant_are_one_message() -> None:
    """Thinking is given back as reasoning; what is redacted is left out."""
    thinking = [{"type": "thinking", "thinking": each, "signature": "x"} for each in "ab"]
    redacted = {"type": "redacted_thinking", "data": "x"}
    turn = blocks("assistant", *thinking, redacted, text("c"), USE, USE | {"id": "toolu_2"})
    [_, message, _] = chat_of(messages=[*HI, turn, *HI])["messages"]
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    assert message == {
        "role": "assistant",
        "content": "c",
        "reasoning_content": "a\nb",
        "tool_calls": [call | {"id": "toolu_1"}, call | {"id": "toolu_2"}],
    }


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "adaptive"}}, {"reasoning_effort": "medium"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
         {"reasoning_effort": "low"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048},
         {"reasoning_effort": "medium", "thinking_token_budget": 1024}),
        ({"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
         {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}},
         {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
        ({"tools": TOOLS, "tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
         {"response_format": {"type": "json_schema",
                              "json_schema": {"name": "output", "schema_": SCHEMA,
                                              "strict": True}}}),
        ({"stop_sequences": ["a", "b"], "top_k": 3, "top_p": 0.5, "temperature": 0.1},
         {"stop": ("a", "b"), "top_k": 3, "top_p": 0.5, "temperature": 0.1}),
        ({"service_tier": "standard_only"}, {"service_tier": "default"}),
    ],
)  # fmt: skip
def test_parameters_are_those_of_a_chat(fields: Any, asked: Any) -> None:
    chat = chat_of(**fields)
    assert {name: chat[name] for name in asked} == asked
    if "tools" in fields:
        function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
        assert chat["tools"] == [{"type": "function", "function": function}]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [blocks("user")]}, "messages.0.content"),
    ({"messages": [*HI, blocks("assistant", text("It is"))]}, "messages"),
    ({"messages": [blocks("user", USE)]}, "messages"),
    ({"messages": [blocks("user", {"type": "text"})]}, "messages.0.content.0.text"),
    ({"messages": [blocks("assistant", USE | {"id": None}), *HI]}, "messages.0.content.0.id"),
    ({"messages": [blocks("user", {"type": "document"})]}, "messages.0.content.0.type"),
    ({"messages": [blocks("user", result([{"type": "document"}]))]},
     "messages.0.content.0.content.0.type"),
    ({"messages": [blocks("user", PNG)]}, "messages"),
    ({"messages": [blocks("user", PNG | {"source": {"type": "url", "url": "https://a/b.png"}})]},
     "messages.0.content.0.source"),
    ({"system": 1}, "system"),
    ({"system": [USE]}, "system.0.type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
    ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
    ({"tools": [TOOLS[0] | {"defer_loading": True}]}, "tools.0.defer_loading"),
    ({"tools": TOOLS * 2}, "tools"),
    ({"tools": [TOOLS[0] | {"strict": True, "input_schema": {"not": {}}}]}, "tools.0.input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": TOOLS}, "tool_choice.name"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
     "output_config.format.schema"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": 3}, "temperature"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"max_token": 1}, "max_token"),
]  # fmt: skip


def check_error(answer: httpx.Response, status: int, kind: str) -> str:
    """The message of an error in Anthropic's form, which also has OpenAI's members."""
    assert error_of(answer)[0] == status, answer.text
    body = answer.json()
    assert body | {"error": None} == {
        "type": "error",
        "error": None,
        "request_id": answer.headers["request-id"],
    }
    assert body["error"]["type"] == kind
    message: str = body["error"]["message"]
    return message


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_what_is_refused_is_named(
    idle_worker: FakeWorker, http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await http.post("/v1/messages", json=BODY | fields)
    message = check_error(answer, 400, "invalid_request_error")
    assert (error_of(answer)[1] or "").startswith(param)
    assert message.startswith(param)


async def test_every_error_has_anthropics_form(
    idle_worker: FakeWorker,
    http: httpx.AsyncClient,
    gateways: Gateways,
    bearer: Bearer,
    redis_client: redis.asyncio.Redis,
) -> None:
    """Of the head, the body, the model, the load and the key; other paths keep OpenAI's."""
    check_error(await http.post("/v1/messages", content="{"), 415, "invalid_request_error")
    check_error(await http.get("/v1/messages"), 405, "invalid_request_error")
    check_error(await http.post("/v1/messages/batches", json={}), 404, "not_found_error")
    answer = await http.post("/v1/messages", json=BODY | {"model": "other"})
    assert "other" in check_error(answer, 404, "not_found_error")
    answer = await http.post("/v1/messages", json=BODY, headers={"host": "evil.example"})
    check_error(answer, 400, "invalid_request_error")
    big = BODY | {"system": "x" * 5_000_000}
    check_error(await http.post("/v1/messages", json=big), 413, "request_too_large")
    assert error_of(await http.post("/v1/chat/completions", json={}))[0] == 400
    key = await bearer("acme", scopes=("inference",), requests_per_minute=1)
    reader = await bearer("acme", scopes=("jobs:read",))
    async with gateways() as locked:
        check_error(await locked.post("/v1/messages", json=BODY), 401, "authentication_error")
        named = {"x-api-key": reader["authorization"].removeprefix("Bearer ")}
        answer = await locked.post("/v1/messages", json=BODY, headers=named)
        check_error(answer, 403, "permission_error")
        counted = await locked.post("/v1/messages/count_tokens", json=without(BODY), headers=key)
        assert counted.status_code == 200
        answer = await locked.post("/v1/messages", json=BODY, headers=key)
        check_error(answer, 429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) > 0


async def test_without_a_worker_it_is_overloaded(
    redis_client: redis.asyncio.Redis, keys: Keys, http: httpx.AsyncClient
) -> None:
    await publish_model(redis_client, keys)
    check_error(await http.post("/v1/messages", json=BODY), 529, "overloaded_error")


async def test_a_prompt_beyond_the_context_is_told_in_anthropics_words(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """By which clients know it, with the numbers that they read."""
    long = BODY | {"messages": [blocks("user", text("x" * CONTEXT_LENGTH))]}
    message = check_error(await http.post("/v1/messages", json=long), 400, "invalid_request_error")
    counted = (await http.post("/v1/messages/count_tokens", json=without(long))).json()
    expected = f"prompt is too long: {counted['input_tokens']} tokens > {CONTEXT_LENGTH} maximum"
    assert message == expected


def without(body: dict[str, Any]) -> dict[str, Any]:
    """What a count of tokens takes of a body."""
    return {name: value for name, value in body.items() if name != "max_tokens"}


@pytest.mark.parametrize(
    "fields",
    [{}, {"system": "S"}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": {"type": "none"}}],
)
async def test_tokens_are_counted_as_the_call_counts_them(
    worker: FakeWorker, http: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    body = BODY | fields
    counted = await http.post("/v1/messages/count_tokens", json=without(body))
    assert worker.seen == []
    usage = (await http.post("/v1/messages", json=body)).json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"]}


async def test_a_stream_goes_on_at_any_gateway_from_every_event(
    worker: FakeWorker, http: httpx.AsyncClient, gateways: Gateways
) -> None:
    """With its Idempotency-Key: the same bytes, of the one job."""
    body, headers = BODY | {"stream": True}, {"idempotency-key": "k-messages"}
    whole = (await http.post("/v1/messages", json=body, headers=headers)).text
    ids = [event.id for event in Parser().feed(whole.encode()) if event.id]
    assert len(ids) == 3
    async with gateways() as other:
        for last_id in ids:
            resumed = headers | {"last-event-id": last_id}
            answer = await other.post("/v1/messages", json=body, headers=resumed)
            assert answer.text == whole.partition(f"id: {last_id}\n\n")[2]
    assert len(worker.seen) == 1


async def test_a_failure_in_a_stream_is_an_error_event(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    calling = asyncio.create_task(http.post("/v1/messages", json=BODY | {"stream": True}))
    claimed = await idle_worker.claim()
    await idle_worker.say(claimed, 1, says("a", "b")(claimed.job)[0])
    await idle_worker.finish(claimed, 2, "engine_error", "it broke")
    answer = await calling
    *_, delta, error = events_in(answer)
    assert delta["type"] == "content_block_delta"
    details = {"type": "api_error", "message": "it broke", "code": "engine_error", "param": None}
    request_id = answer.headers["request-id"]
    assert error == {"type": "error", "error": details, "request_id": request_id}


@pytest.mark.parametrize(
    ("reasoning", "can", "thinking", "status"),
    [
        (None, True, {"type": "adaptive"}, 200),
        (None, True, {"type": "enabled", "budget_tokens": 1024}, 200),
        (None, True, {"type": "disabled"}, 200),
        (THINK, False, {"type": "enabled", "budget_tokens": 1024}, 200),
        (THINK, True, {"type": "adaptive"}, 200),
        (THINK, True, {"type": "disabled"}, 400),
    ],
)
async def test_a_model_that_cannot_be_told_to_think_thinks_as_it_does(
    http: httpx.AsyncClient,
    published: Published,  # noqa: F811
    reasoning: Any,
    can: bool,
    thinking: Any,
    status: int,
) -> None:
    """Its template has no switch. Only a wish for no thinking at all is refused."""
    name = f"m-{status}-{can}-{thinking['type']}-{reasoning is None}"
    await published(name, reasoning, structured_output=can)
    body = without(BODY) | {"model": name, "thinking": thinking}
    answer = await http.post("/v1/messages/count_tokens", json=body)
    assert answer.status_code == status, answer.text
    if status == 400:
        assert check_error(answer, 400, "invalid_request_error").startswith("thinking: ")


def said(role: str, words: str) -> dict[str, Any]:
    return {"role": role, "content": words}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("messages", {"system": "S", "messages": [*HI, blocks("system", text("T"))]}),
        ("chat/completions", {"messages": [said("system", "S"), *HI, said("developer", "T")]}),
        ("responses", {"instructions": "S", "input": [*HI, said("developer", "T")]}),
    ],
)
async def test_later_system_messages_become_the_users_where_the_template_takes_none(
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    functions: Functions,
    http: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    files = replace(hash_tokenizer(), chat_template=template)
    await publish_model(redis_client, keys)
    await publish_model(redis_client, keys, "strict", files=files, capabilities=Capabilities())
    worker = FakeWorker(functions, "strict", "w-strict")
    await worker.beat()
    await until_listed(http, {"strict"})
    is_response = path == "responses"
    body |= {"model": "strict"} | ({"background": True} if is_response else {"max_tokens": 20})
    headers = {"prefer": "respond-async"}
    answer = await http.post(f"/v1/{path}", json=body, headers=headers)
    assert answer.status_code == (200 if is_response else 202), answer.text
    prompt = output_text((await worker.claim()).job.prompt_ids)
    assert prompt == "system: S\nuser: Hi\nT\n"


async def test_thinking_may_be_left_out(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """Of the answer: its signature alone is shown."""
    worker.script = lambda _: [
        Tokens((ChoiceDelta(0, 0, (97,), "", reasoning="hm", num_reasoning=1),)),
        Tokens((ChoiceDelta(0, 1, (97,), "a", FinishReason.STOP),)),
    ]
    for display, shown in {"summarized": "hm", "omitted": ""}.items():
        thinking = {"type": "adaptive", "display": display}
        answer = (await http.post("/v1/messages", json=BODY | {"thinking": thinking})).json()
        signature = answer["content"][0]["signature"]
        assert signature
        assert answer["content"] == [
            {"type": "thinking", "thinking": shown, "signature": signature},
            text("a"),
        ]
        assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": 1}
