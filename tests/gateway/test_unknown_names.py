"""Names that this server does not know: at the top of a body they are refused, but for those that
clients are known to send; in the objects of a body they are ignored, and a header names them."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.prepare.response_bodies import ResponseBody
from gateway.prepare.schemas import ChatBody, CompletionBody
from gateway.prepare.unsupported import IGNORED, CallFields, ignored_header
from gateway.prepare.vector_bodies import ClassifyBody, EmbeddingsBody, RerankBody, ScoreBody
from tests.gateway.fake_worker import MODEL, FakeWorker

_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_SCHEMA = {"name": "s", "schema": {"type": "object"}, "strict": True}
_CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "b"},
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
}
_ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {
        "type": "reasoning",
        "id": "r",
        "summary": [{"type": "summary_text", "text": "s"}],
        "content": [{"type": "reasoning_text", "text": "t"}],
    },
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_text", "text": ""}],
    },
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
    {"id": "msg_1"},
]
# Each kind of body with each of its objects.
BODIES: list[tuple[type[CallFields], dict[str, Any]]] = [
    (ChatBody, _CHAT | {"response_format": {"type": "json_schema", "json_schema": _SCHEMA}}),
    (
        ChatBody,
        _CHAT | {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    (ChatBody, _CHAT | {"structured_outputs": {"regex": "a"}}),
    (CompletionBody, {"model": MODEL, "prompt": "a", "response_format": {"type": "text"}}),
    (EmbeddingsBody, {"model": MODEL, "input": ["a", "b"]}),
    (ClassifyBody, {"model": MODEL, "input": [["a", "b"]]}),
    (ScoreBody, {"model": MODEL, "text_1": "a", "text_2": ["b"]}),
    (RerankBody, {"model": MODEL, "query": "q", "documents": ["a", {"text": "b"}]}),
    (
        ResponseBody,
        {
            "model": MODEL,
            "input": _ITEMS,
            "stream": True,
            "stream_options": {},
            "reasoning": {},
            "text": {"format": {"type": "json_schema", "name": "s", "schema": {}}},
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "tool_choice": {"type": "function", "name": "f"},
        },
    ),
]
_FREE = {"schema", "parameters", "metadata"}  # objects of the caller's own
VALUES: list[Any] = [0, 7, "x", None, False, [], [1], {"type": "ephemeral"}]
_SENT = ("index", "opts", "cache_control", "timestamp", "annotations", "phase", "contents", "typ")


def objects(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects below a body, with their paths without positions."""
    for name, value in node.items():
        inner = f"{path}{name}"
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict) and name not in _FREE:
                yield inner, each
                yield from objects(each, f"{inner}.")


def named(body: CallFields) -> list[str]:
    header = ignored_header(body).get("x-ignored-parameters", "")
    return header.split(", ") if header else []


PLACES = [
    (number, place)
    for number, (_, body) in enumerate(BODIES)
    for place in range(len(list(objects(body))))
]


def test_the_bodies_hold_an_object_of_each_kind() -> None:
    """Otherwise the tests below would pass where nothing is tried."""
    paths = {path for _, body in BODIES for path, _ in objects(body)}
    assert len(PLACES) == 47
    assert {
        "messages.content",
        "messages.tool_calls.function",
        "documents",
        "input.content",
    } < paths


@pytest.mark.parametrize(("number", "place"), PLACES)
def test_unknown_names_in_objects_are_ignored_and_named(number: int, place: int) -> None:
    """In each object of each body, with values of each type, also names that are close to known
    ones; the rest is as without them."""
    model, body = BODIES[number]
    path, _ = list(objects(body))[place]
    expected = model.model_validate(body).model_dump(mode="json")
    for name in _SENT:
        for value in VALUES:
            changed = copy.deepcopy(body)
            list(objects(changed))[place][1][name] = value
            found = model.model_validate(changed)
            assert named(found) == [f"{path}.{name}"]
            assert found.model_dump(mode="json") == expected


@pytest.mark.parametrize("model", [model for model, _ in BODIES])
def test_at_the_top_unknown_names_are_refused(model: type[CallFields]) -> None:
    """A name that is close to a known one with the suggestion, also with null, which would be the
    default; any other without."""
    body = next(body for each, body in BODIES if each is model)
    for name in sorted({field.alias or name for name, field in model.model_fields.items()}):
        if len(name) < 4:
            continue
        for wrong in (name[:-1] + "_", name + "s", name.title()):
            if wrong in model.unasked or wrong in IGNORED or wrong in model.model_fields:
                continue
            with pytest.raises(ValidationError, match="unknown parameter; did you mean"):
                model.model_validate(body | {wrong: None})
    with pytest.raises(ValidationError, match=r"unknown parameter \["):
        model.model_validate(body | {"qqqqqq": 1})


@pytest.mark.parametrize("model", [model for model, _ in BODIES])
def test_names_that_clients_are_known_to_send_are_ignored_and_named(
    model: type[CallFields],
) -> None:
    """With any value; one that asks for nothing is not named."""
    body = next(body for each, body in BODIES if each is model)
    for name in IGNORED - model.model_fields.keys():
        for value in VALUES:
            found = model.model_validate(body | {name: value})
            assert named(found) == ([name] if value else [])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(), max_size=60, unique=True))
def test_the_header_is_safe_and_short(names: list[str]) -> None:
    """Whatever the names are: no line ends, nothing but ASCII, and so many names."""
    message = {"role": "user", "content": "a"} | {f"x{name}": 1 for name in names}
    found = ignored_header(ChatBody.model_validate(_CHAT | {"messages": [message]}))
    header = found.get("x-ignored-parameters", "")
    assert re.fullmatch(r"[A-Za-z0-9_.$@/?, -]*", header)
    assert len(header) < 3_000
    assert header.endswith("...") == (len(names) > 20)


@pytest.mark.anyio
async def test_calls_with_unknown_names_are_answered(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """Whole, as a stream, as a job and as a job's body; a header names them where there is one."""
    messages = [{"role": "user", "content": "Hi", "id": 7}, *_CHAT["messages"][1:]]
    messages[1] |= {"tool_calls": [_CALL | {"index": 0}], "timestamp": 1}
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "user": "u",
        "safety_identifier": "b",
    }
    body |= {"prompt_cache_key": "c", "metadata": None}  # null asks for nothing
    expected = (
        "prompt_cache_key, safety_identifier, user, messages.id, messages.timestamp, "
        "messages.tool_calls.index"
    )
    for more, headers in (({}, {}), ({"stream": True}, {}), ({}, {"prefer": "respond-async"})):
        answer = await http.post("/v1/chat/completions", json=body | more, headers=headers)
        assert answer.status_code < 300, answer.text
        assert answer.headers["x-ignored-parameters"] == expected
    job = {"endpoint": "/v1/chat/completions", "body": body}
    answer = await http.post("/v1/jobs", json=job)
    assert answer.status_code == 202
    assert answer.headers["x-ignored-parameters"] == expected
    prompt = {"model": MODEL, "prompt": "a", "metadata": {"a": "b"}}
    answer = await http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": prompt})
    assert answer.headers["x-ignored-parameters"] == "metadata"
    answer = await http.post("/v1/jobs", json=job | {"callback": {"url": "https://a", "urll": ""}})
    assert answer.json()["error"]["param"] == "callback.urll", "objects of our own are checked"
    answer = await http.post("/v1/chat/completions", json=body | {"temprature": 1})
    assert answer.json()["error"]["message"].endswith("did you mean temperature?")
