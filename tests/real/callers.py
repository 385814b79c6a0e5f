"""Asks a server for an answer in each way that the API has."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import httpx

from tests.real.cases import Answer, Case
from tests.real.families import Call
from tests.real.server import Server, until_true

CHAT: Final = "/v1/chat/completions"
# Parameters of a chat that a response has, too.
_SHARED = ("chat_template_kwargs", "thinking_token_budget")
_WAIT_S = 60.0


def body_of(server: Server, case: Case, more: str = "") -> dict[str, Any]:
    """The request; `more`: text of its message."""
    marker = server.say(case.says)
    message = {"role": "user", "content": f"Please: {marker} {more}".strip()}
    return {"model": server.family.name, "messages": [message], "max_tokens": 400, **case.body}


def ask(server: Server, body: Mapping[str, Any]) -> dict[str, Any]:
    """The whole response, by OpenAI's client."""
    return _created(server, body).to_dict()  # type: ignore[no-any-return]


def ask_streamed(server: Server, body: Mapping[str, Any]) -> dict[str, Any]:
    """A response, put together from chunks."""
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    return joined(chunk.to_dict() for chunk in _created(server, streamed))


def _created(server: Server, body: Mapping[str, Any]) -> Any:
    own = {
        name: body[name]
        for name in ("model", "messages", "stream", "stream_options", "tools")
        if name in body
    }
    extra = {name: value for name, value in body.items() if name not in own}
    return server.client.chat.completions.create(**own, extra_body=extra)


def joined(chunks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    finish_reason = usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            assert finish_reason is None, "nothing follows the end"
            finish_reason = choice["finish_reason"]
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for part in delta.get("tool_calls") or ():
                _add(calls, part)
    if calls:
        message["tool_calls"] = list(calls.values())
    return {"choices": [{"message": message, "finish_reason": finish_reason}], "usage": usage}


def _add(calls: dict[int, dict[str, Any]], part: Mapping[str, Any]) -> None:
    """A part of a call; only its first has id and name."""
    if part["index"] not in calls:
        calls[part["index"]] = {
            "id": part["id"],
            "type": part["type"],
            "function": {"name": part["function"]["name"], "arguments": ""},
        }
    calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""


def answer_of(response: Mapping[str, Any]) -> Answer:
    [choice] = response["choices"]
    message, usage = choice["message"], response["usage"]
    calls = tuple(map(_call, message.get("tool_calls") or ()))
    details = usage.get("completion_tokens_details") or {}
    return Answer(
        content=message["content"] or None if calls else message["content"] or "",
        calls=calls,
        reasoning=message.get("reasoning_content"),
        finish_reason=choice["finish_reason"],
        num_tokens=usage["completion_tokens"],
        num_reasoning_tokens=details.get("reasoning_tokens", 0),
    )


def _call(call: Mapping[str, Any]) -> Call:
    function = call["function"]
    try:
        return function["name"], json.loads(function["arguments"])
    except ValueError:  # of a model's mistake
        return function["name"], {"": function["arguments"]}


def run_jobs(server: Server, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The responses of jobs, all at once."""
    ids = []
    for body in bodies:
        accepted = httpx.post(
            f"{server.url}/v1/jobs", json={"endpoint": CHAT, "body": body}, timeout=30
        )
        assert accepted.status_code == 202, accepted.text
        ids.append(accepted.json()["id"])
    return [_job_result(server, job_id) for job_id in ids]


def _job_result(server: Server, job_id: str) -> dict[str, Any]:
    job: dict[str, Any] = {}

    def has_ended() -> bool:
        job.update(httpx.get(f"{server.url}/v1/jobs/{job_id}", timeout=30).json())
        return job["status"] not in ("queued", "running")

    until_true(has_ended, _WAIT_S)
    assert job["status"] == "succeeded", job
    return job["result"]  # type: ignore[no-any-return]


def run_batch(server: Server, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The responses of a batch, in the order of its lines."""
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": CHAT, "body": body})
        for number, body in enumerate(bodies)
    ]
    client = server.client
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

    def has_ended() -> bool:
        nonlocal batch
        batch = client.batches.retrieve(batch.id)
        return batch.status in ("completed", "failed", "expired", "cancelled")

    until_true(has_ended, _WAIT_S)
    assert batch.output_file_id is not None, batch
    found = [
        json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()
    ]
    assert [each["custom_id"] for each in found] == [str(n) for n in range(len(bodies))]
    return [each["response"]["body"] for each in found]


def respond(server: Server, body: Mapping[str, Any]) -> dict[str, Any]:
    """The whole response of /v1/responses to a chat's request."""
    own, extra = _as_response(body)
    return server.client.responses.create(**own, extra_body=extra).to_dict()  # type: ignore[no-any-return]


def respond_streamed(server: Server, body: Mapping[str, Any]) -> dict[str, Any]:
    own, extra = _as_response(body)
    with server.client.responses.stream(**own, extra_body=extra) as events:
        *_, last = events
    assert last.type in ("response.completed", "response.incomplete")
    return last.response.to_dict()


def _as_response(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What OpenAI's client knows, and the rest."""
    own: dict[str, Any] = {
        "model": body["model"],
        "input": body["messages"],
        "max_output_tokens": body["max_tokens"],
    }
    if "tools" in body:
        own["tools"] = [{"type": "function", **tool["function"]} for tool in body["tools"]]
    if "tool_choice" in body:
        choice = body["tool_choice"]
        is_named = isinstance(choice, dict)
        own["tool_choice"] = {"type": "function", **choice["function"]} if is_named else choice
    if "response_format" in body:
        format_ = body["response_format"]["json_schema"]
        own["text"] = {"format": {"type": "json_schema", **format_}}
    if "reasoning_effort" in body:
        own["reasoning"] = {"effort": body["reasoning_effort"]}
    return own, {name: body[name] for name in _SHARED if name in body}


def answer_of_items(response: Mapping[str, Any]) -> Answer:
    """The items of a response as a chat's answer."""
    texts: dict[str, list[str]] = {"message": [], "reasoning": []}
    calls: list[Call] = []
    for item in response["output"]:
        if item["type"] == "function_call":
            calls.append(_call({"function": item}))
        else:
            texts[item["type"]] += [part["text"] for part in item["content"]]
    content, reasoning = ("".join(texts[kind]) for kind in ("message", "reasoning"))
    usage = response["usage"]
    is_whole = response["status"] == "completed"
    return Answer(
        content=content or None if calls else content,
        calls=tuple(calls),
        reasoning=reasoning or None,
        finish_reason=("tool_calls" if calls else "stop") if is_whole else "length",
        num_tokens=usage["output_tokens"],
        num_reasoning_tokens=usage["output_tokens_details"]["reasoning_tokens"],
    )
