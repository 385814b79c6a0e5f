"""Tools: what the model is shown, what its output is constrained to, and how calls are answered."""

from typing import Any

import httpx
import pytest

from contract.events import ChoiceDelta, Tokens, ToolCallDelta
from contract.jobs import FinishReason
from tests.fakes import output_text
from tests.gateway.fake_worker import MODEL, FakeWorker
from tests.gateway.test_structured import accepts
from tests.streams import whole_stream

pytestmark = pytest.mark.anyio

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
NAMED = {"type": "function", "function": {"name": "add"}}
ONE = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
ANSWER = '{"a": 1}'
JSON = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "r", "schema": PARAMETERS, "strict": True},
    }
}
OTHER = '<call>{"name": "now", "arguments": {}}</call>'
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def submitted(http: httpx.AsyncClient, worker: FakeWorker, **fields: Any) -> Any:
    """The job of a chat with these fields."""
    body = {"endpoint": "/v1/chat/completions", "body": CHAT | fields}
    answer = await http.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    return (await worker.claim()).job


@pytest.mark.parametrize(
    ("fields", "accepted", "refused"),
    [
        ({"tool_choice": "required"}, [ONE, OTHER, ONE + OTHER], ["Hi", ONE + "x", ONE[:-1]]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [ONE, OTHER], [ONE + ONE]),
        ({"tool_choice": NAMED}, [ONE], [OTHER, ONE + ONE]),
        ({"tool_choice": ALLOWED}, [ONE, ONE + ONE], [OTHER, "Hi"]),
        ({"tools": STRICT}, [ONE, "Hi", "Hi <b>\n" + ONE], ['<call>{"name": "no', ONE + "x"]),
        *(
            ({**asked, **choice}, accepted, refused)
            for asked in (JSON, {"guided_json": PARAMETERS}, {"guided_regex": r'\{"a": 1\}'})
            for choice, accepted, refused in (
                ({}, [ANSWER, ONE, ONE + OTHER], ["Hi", ANSWER + ONE, "Hi " + ONE, '{"a": "x"}']),
                ({"tools": STRICT}, [ANSWER, ONE], ["Hi", OTHER]),
                ({"parallel_tool_calls": False}, [ANSWER, ONE], [ONE + OTHER]),
                ({"tool_choice": "required"}, [ONE, ONE + OTHER], [ANSWER]),
                ({"tool_choice": NAMED}, [ONE], [ANSWER, OTHER]),
                ({"tool_choice": "none"}, [ANSWER], [ONE, "Hi"]),
            )
        ),
    ],
)
async def test_calls_are_forced_in_the_models_format(
    http: httpx.AsyncClient,
    idle_worker: FakeWorker,
    fields: dict[str, Any],
    accepted: list[str],
    refused: list[str],
) -> None:
    """A required or named call, and any call of a strict function; arguments fit the schema. Beside
    a response format the model chooses: a call, or an answer in that form."""
    job = await submitted(http, idle_worker, **{"tools": TOOLS, **fields})

    grammar = job.params.grammar
    assert [text for text in accepted if not accepts(grammar, text)] == []
    wrong = ONE.replace("1", '"one"')
    assert [text for text in [*refused, wrong] if accepts(grammar, text)] == []


# A full definition in place of a name is one, too.
_AUTO = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOLS[1]]}}


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ({}, ["add", "now"]),
        ({"tool_choice": "auto"}, ["add", "now"]),
        ({"tool_choice": _AUTO}, ["now"]),
        ({"tool_choice": "none"}, []),
    ],
)
async def test_the_model_is_shown_the_allowed_tools_alone(
    http: httpx.AsyncClient, idle_worker: FakeWorker, choice: dict[str, Any], shown: list[str]
) -> None:
    """Of which it decides without a constraint; the worker parses the output."""
    job = await submitted(http, idle_worker, tools=TOOLS, **choice)

    assert job.params.grammar == ""
    assert job.tools == dict.fromkeys(shown, ())
    prompt = output_text(job.prompt_ids)
    assert [name for name in ("add", "now") if f'"{name}"' in prompt] == shown
    tool = 'tool: {"type": "function", "function": {"name"'
    assert prompt.startswith(tool) if shown else prompt == "user: Hi\nassistant: "


async def test_calls_and_results_are_rendered(
    http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """Arguments, which callers send as text, are an object to the template. Reasoning comes back as
    it was answered, and what LiteLLM adds is dropped."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "reasoning_content": "so",
            "provider_specific_fields": {"refusal": None},
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2", "reasoning_content": ""},
    ]
    job = await submitted(http, idle_worker, messages=messages)

    assert output_text(job.prompt_ids) == (f"user: Hi\nassistant: (so) {ONE}\ntool: 2\nassistant: ")


DELTAS = [
    ChoiceDelta(0, 0, (1,), "Well.", reasoning="so"),
    ChoiceDelta(0, 1, (2,), "", tool_calls=(ToolCallDelta(0, "add", '{"a"'),)),
    ChoiceDelta(0, 2, (3,), "", tool_calls=(ToolCallDelta(0, "", ": 1}"),)),
    ChoiceDelta(
        0, 3, (4,), "", FinishReason.TOOL_CALLS, tool_calls=(ToolCallDelta(1, "now", "{}"),)
    ),
]


async def test_an_answer_has_the_calls(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    """Each has an id of its own; the chunks of a stream add up to the answer."""
    worker.script = lambda job: [Tokens((delta,)) for delta in DELTAS]
    body = CHAT | {"tools": TOOLS}
    [choice] = (await http.post("/v1/chat/completions", json=body)).json()["choices"]

    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"]) == ("Well.", "so")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2

    key = {"Idempotency-Key": "tools"}
    streams = [
        await http.post("/v1/chat/completions", json=body | {"stream": True}, headers=key)
        for _ in range(2)
    ]
    first, again = [stream.text for stream in streams]
    assert again == first
    chunks = [event.data for event in whole_stream(first)]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1] == {"content": "Well.", "reasoning_content": "so"}
    calls = [delta["tool_calls"][0] for delta in deltas[2:]]
    assert [call["index"] for call in calls] == [0, 0, 1]
    assert [call["function"].get("name") for call in calls] == ["add", None, "now"]
    assert [call["function"]["arguments"] for call in calls] == ['{"a"', ": 1}", "{}"]
    assert ["id" in call for call in calls] == [True, False, True]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_call_without_text_has_null_as_its_content(
    http: httpx.AsyncClient, worker: FakeWorker
) -> None:
    """As OpenAI has it."""
    call = ToolCallDelta(0, "now", "{}")
    delta = ChoiceDelta(0, 0, (1,), "", FinishReason.TOOL_CALLS, tool_calls=(call,))
    worker.script = lambda job: [Tokens((delta,))]
    answer = await http.post("/v1/chat/completions", json=CHAT | {"tools": TOOLS})
    assert answer.json()["choices"][0]["message"]["content"] is None
