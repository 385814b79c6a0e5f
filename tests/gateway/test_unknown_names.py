"""Names that this server does not know: at the top of a body, and in objects that say what is
wanted, they are refused, but for those that are known to change no answer; in past messages they
are ignored. A header names what is ignored."""

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
from gateway.prepare.unsupported import (
    DESCRIPTIONS,
    IGNORED,
    UNSUPPORTED,
    CallFields,
    ignored_header,
)
from gateway.prepare.vector_bodies import ClassifyBody, EmbeddingsBody, RerankBody, ScoreBody
from tests.gateway.conftest import Gateways, error_of
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


# Objects of past messages, and of how an answer is sent.
_PAST = ("messages", "input", "documents", "stream_options")


@pytest.mark.parametrize(("number", "place"), PLACES)
def test_unknown_names_in_objects_are_refused_or_ignored_and_named(number: int, place: int) -> None:
    """In each object of each body, with values of each type, also names that are close to known
    ones; where they are ignored, the rest is as without them."""
    model, body = BODIES[number]
    path, _ = list(objects(body))[place]
    expected = model.model_validate(body).model_dump(mode="json")
    is_past = path.startswith(_PAST)
    for name in (*_SENT, "input_schema", "disable_any_spaces"):
        for value in VALUES:
            changed = copy.deepcopy(body)
            list(objects(changed))[place][1][name] = value
            if not is_past and name not in DESCRIPTIONS and value is not None:
                with pytest.raises(ValidationError):
                    model.model_validate(changed)
                continue
            found = model.model_validate(changed)
            is_named = is_past or (value and name in DESCRIPTIONS)
            assert named(found) == ([f"{path}.{name}"] if is_named else [])
            assert found.model_dump(mode="json") == expected


@pytest.mark.parametrize("model", [ChatBody, CompletionBody, ResponseBody])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_values_that_ask_for_nothing_are_taken(model: type[CallFields], name: str) -> None:
    """Those of other servers' own fields, which their clients write out; any other is refused."""
    if name in model.model_fields:
        return
    body = next(body for each, body in BODIES if each is model)
    for value in (None, *UNSUPPORTED[name]):
        assert named(model.model_validate(body | {name: value})) == []
    with pytest.raises(ValidationError, match="not supported with this value"):
        model.model_validate(body | {name: "no such value"})


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ChatBody, {"max_tokens": -1, "max_completion_tokens": -1, "seed": -1, "logit_bias": []}),
        (ChatBody, {"logprobs": False, "top_logprobs": 0, "thinking_token_budget": None}),
        (CompletionBody, {"max_tokens": -1, "seed": -1, "logit_bias": [], "echo": False}),
        (ResponseBody, {"max_output_tokens": -1, "seed": -1, "logit_bias": {}, "top_k": -1}),
    ],
)
def test_values_of_known_names_that_ask_for_nothing_are_the_defaults(
    model: type[CallFields], fields: dict[str, Any]
) -> None:
    """Those that other servers' programs write out."""
    body = next(body for each, body in BODIES if each is model)
    found, expected = (model.model_validate(body | each) for each in (fields, {}))
    ours = fields.keys() - {"logprobs", "top_logprobs", "echo"}
    assert [(n, getattr(found, n)) for n in ours & model.model_fields.keys()] == [
        (n, getattr(expected, n)) for n in ours & model.model_fields.keys()
    ]
    assert named(found) == []


_OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "schema": _OBJECT}}, "schema"),
        ({"response_format": {"type": "text", "schema": _OBJECT}}, "schema"),
        (
            {"structured_outputs": {"json": _OBJECT, "whitespace_pattern": " "}},
            "whitespace_pattern",
        ),
        ({"structured_outputs": {"json": _OBJECT, "disable_any_whitespace": True}}, "disable_any"),
        ({"tools": [_TOOL | {"strict": True}]}, "strict"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "input_schema": {}}}]},
            "input_",
        ),
        ({"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "prefix"),
    ],
)
def test_names_below_the_top_that_change_the_answer_are_refused(
    fields: dict[str, Any], param: str
) -> None:
    """Those of other servers and APIs."""
    with pytest.raises(ValidationError) as refused:
        ChatBody.model_validate(_CHAT | fields)
    assert refused.value.errors()[0]["ctx"]["param"].startswith(param)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "structured_outputs": {
                "regex": "a",
                "json": None,
                "json_object": False,
                "_backend": None,
            }
        },
        {"structured_outputs": {"choice": ["a"], "disable_any_whitespace": False}},
        {"response_format": {"type": "json_object", "json_schema": None, "schema": None}},
        {"tools": [_TOOL | {"strict": False, "defer_loading": None}]},
        {"messages": [{"role": "assistant", "content": "a", "prefix": False, "audio": None}]},
    ],
)
def test_nested_values_that_ask_for_nothing_are_taken(fields: dict[str, Any]) -> None:
    """Nulls, and the defaults of other servers."""
    assert named(ChatBody.model_validate(_CHAT | fields)) == []


def test_a_schema_beside_json_object_is_enforced() -> None:
    """As other servers do."""
    format_ = {"type": "json_object", "schema": {"type": "object", "required": ["a"]}}
    constraint = ChatBody.model_validate(_CHAT | {"response_format": format_}).constraint
    assert constraint is not None
    assert constraint.request["value"] == format_["schema"]


_WITH_OTHERS = {
    "model": MODEL,
    "input": "Hi",
    "client_metadata": {"session_id": "s"},
    "tools": [
        {"type": "function", "name": "f", "parameters": {}},
        {"type": "web_search", "filters": {}},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
    ],
}


def test_tools_that_are_no_functions_are_left_out_of_a_response_and_named() -> None:
    """Coding agents offer them to every model, and send encrypted reasoning of others."""
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "summary": [], "encrypted_content": "x", "content": None}
    ]
    body = ResponseBody.model_validate(_WITH_OTHERS | {"input": items})
    assert [tool.name for tool in body.functions] == ["f"]
    tools = ["tools.web_search", "tools.custom", "tools.namespace"]
    assert named(body) == [*tools, "client_metadata", "input.encrypted_content"]
    chat = body.chat([{"role": "user", "content": "Hi"}])
    assert [tool.function.name for tool in chat.tools or ()] == ["f"]


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "web_search"}, "tool_choice.type"),
        ({"type": "custom", "name": "apply_patch"}, "tool_choice.type"),
        ({"type": "function", "name": "apply_patch"}, "tool_choice.name"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom"}]}, "tool_choice"),
    ],
)
@pytest.mark.anyio
async def test_a_choice_of_a_tool_that_is_left_out_is_refused(
    idle_worker: FakeWorker, http: httpx.AsyncClient, choice: dict[str, Any], param: str
) -> None:
    """Its caller would wait for a call that never comes."""
    answer = await http.post("/v1/responses", json=_WITH_OTHERS | {"tool_choice": choice})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


@pytest.mark.anyio
async def test_by_a_setting_tools_that_are_no_functions_are_refused(
    worker: FakeWorker, gateways: Gateways
) -> None:
    """By their types; a chat's always."""
    async with gateways(leaves_out_hosted_tools=False) as http:
        answer = await http.post("/v1/responses", json=_WITH_OTHERS)
        assert error_of(answer) == (400, "tools", "unsupported_parameter")
        chat = {"model": MODEL, "messages": _CHAT["messages"], "tools": [{"type": "custom"}]}
        assert (await http.post("/v1/chat/completions", json=chat)).status_code == 400


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
    assert header.endswith(", ...") == (len(names) > 20)


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
    expected = "safety_identifier, user, messages.id, messages.timestamp, messages.tool_calls.index"
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
