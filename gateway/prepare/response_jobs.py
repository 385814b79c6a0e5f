"""Turns a response's call into a job: the items that the model receives, those of the previous
response and of the call, become messages of a chat."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from contract.function_types import Submission
from contract.jobs import Job
from contract.response_events import Item, ResponseEvents, ResponseRecord, encode_record, item_id
from gateway.follow.stored_responses import read_response, replayed, response_of_item
from gateway.http.errors import UNSUPPORTED, ApiError, bad_request, invalid_value, not_found
from gateway.prepare.calls import prepare_call, session_of
from gateway.prepare.response_bodies import HOSTED, NAMES, ItemReference, ResponseBody
from gateway.prepare.schemas import renamed
from gateway.settings import variable
from gateway.state import Gateway

MAX_REFERENCED = 16  # responses that one call refers to by their items
_PREVIOUS = "previous_response_id"


async def conversation(gateway: Gateway, tenant: str, body: ResponseBody) -> tuple[list[Item], str]:
    """Returns all items that the model receives, and the session of the response that they go on
    from ('': there is none). Items of earlier responses keep their ids. Raises
    ApiError: 404 if an id is unknown, belongs to another tenant, or has expired; 413 if the items
    are longer than a body may be that contains them."""
    params = _referenced(body)
    room = _Room(gateway.settings.max_body_bytes)
    own: dict[int, Item] = {
        i: ({} if item.id is None else {"id": item.id}) | item.kept()
        for i, item in enumerate(body.input)
        if not isinstance(item, ItemReference)
    }
    if params:
        room.take(own.values())
    times = Counter(i.id for i in body.input if isinstance(i, ItemReference))
    earlier, session = list[Item](), ""
    known: dict[str, Item] = {}
    for response, param in params.items():
        found, of_found = await _items_after(gateway, response, tenant, param)
        if response == body.previous_response_id:
            room.take(found)
            earlier, session = found, of_found
        for each in found:
            if each["id"] in times and response_of_item(each["id"]) == response:
                room.take([each], times[each["id"]])
                known[each["id"]] = each
    for i, item in enumerate(body.input):
        if isinstance(item, ItemReference):
            if item.id not in known:
                raise not_found("this item", "item_not_found", f"input.{i}.id")
            own[i] = known[item.id]
    return earlier + [own[i] for i in range(len(body.input))], session


def _referenced(body: ResponseBody) -> dict[str, str]:
    """The responses that must be read, each once, and where the body first names them. Raises
    ApiError."""
    params: dict[str, str] = {}
    for i, item in enumerate(body.input):
        if not isinstance(item, ItemReference):
            continue
        if (response := response_of_item(item.id)) is None:
            raise not_found("this item", "item_not_found", f"input.{i}.id")
        params.setdefault(response, f"input.{i}.id")
    if len(params) > MAX_REFERENCED:
        message = f"input: refers to items of more than {MAX_REFERENCED} responses"
        raise invalid_value("input", message)
    earlier = body.previous_response_id
    return params if earlier is None else {earlier: _PREVIOUS} | params | {earlier: _PREVIOUS}


class _Room:
    """What is left of the bytes that all items may take."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left = max_bytes

    def take(self, items: Iterable[Item], times: int = 1) -> None:
        """Raises ApiError."""
        for item in items:
            self._left -= len(msgspec.msgpack.encode(item)) * times
            if self._left < 0:
                message = (
                    f"input: with what it refers to it has more than {self._max_bytes} bytes, the "
                    f"limit that {variable('max_body_bytes')} sets"
                )
                raise ApiError(413, "body_too_large", message, param="input")


async def _items_after(
    gateway: Gateway, response_id: str, tenant: str, param: str
) -> tuple[list[Item], str]:
    """The items of a response, input and output, without log probabilities, and its session. Raises
    ApiError."""
    view, record = await read_response(gateway, response_id, tenant, param)
    if not view.is_terminal:
        raise bad_request("response_not_ended", f"{param}: that response has not ended yet", param)
    response = await replayed(gateway, view, ResponseEvents(view.job, record))
    if response["status"] not in ("completed", "incomplete"):
        message = f"{param}: that response is {response['status']}"
        raise invalid_value(param, message)
    return [*record.items, *response["output"]], view.job.session


def to_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The items as a chat's messages: an assistant's reasoning, text and calls are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        match item["type"]:
            case "reasoning":
                texts = [part["text"] for part in item["content"] or item["summary"]]
                messages.append({"role": "assistant", "reasoning_content": "\n".join(texts)})
            case "message" if item["role"] == "assistant" and last and last.keys() <= _UNSPOKEN:
                last["content"] = _content(item["content"])
            case "message":
                messages.append({"role": item["role"], "content": _content(item["content"])})
            case "function_call":
                if last is None:
                    last = {"role": "assistant"}
                    messages.append(last)
                last.setdefault("tool_calls", []).append(_call(item))
            case "function_call_output":
                own = {"tool_call_id": item["call_id"], "content": _content(item["output"])}
                messages.append({"role": "tool", **own})
    return messages


_UNSPOKEN = {"role", "reasoning_content"}


def _content(parts: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A chat's content: text alone, or its parts where there are images."""
    if isinstance(parts, str):
        return parts
    if all(part["type"] != "input_image" for part in parts):
        return "\n".join(_text(part) for part in parts)
    return [
        {"type": "text", "text": _text(part)}
        if part["type"] != "input_image"
        else {
            "type": "image_url",
            "image_url": {"url": part.get("image_url"), "file_id": part.get("file_id")},
        }
        for part in parts
    ]


def _text(part: dict[str, Any]) -> str:
    return str(part["refusal" if part["type"] == "refusal" else "text"])


def _call(item: Item) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


async def prepare_response(
    gateway: Gateway, body: ResponseBody, job: Job, submission: Submission
) -> tuple[Job, Submission]:
    """Returns the job, which contains the request, and its submission. The response's metadata is
    also the job's, unless the submission has other values. `job` and `submission`: as Caller makes
    them. Raises ApiError."""
    if (names := body.left_out()) and not gateway.settings.leaves_out_hosted_tools:
        raise bad_request(UNSUPPORTED, f"{', '.join(names)}: {HOSTED}", "tools")
    metadata = {**(body.metadata or {}), **submission.metadata}
    submission = msgspec.structs.replace(submission, metadata=metadata)
    items, earlier = await conversation(gateway, job.tenant, body)
    # The first of a chain, which others may go on from, begins a session.
    session = session_of(body, submission) or earlier or (job.id if body.is_stored else "")
    job = msgspec.structs.replace(job, session=session)
    chat = body.chat(to_messages(items))
    with renamed(NAMES):
        job, submission = await prepare_call(gateway, chat, job, submission)
    try:
        record = encode_record(record_of(job, body, items))
    except OverflowError:  # of an integer over 64 bits, which only schemas may have
        raise invalid_value("tools", "tools: a number is out of range") from None
    return msgspec.structs.replace(job, response=record), submission


def record_of(job: Job, body: ResponseBody, items: list[Item]) -> ResponseRecord:
    """Returns the record of a new job; items without ids get ids."""
    return ResponseRecord(
        shown=_shown(job, body),
        items=[{"id": item_id(job, item["type"], i)} | item for i, item in enumerate(items)],
        is_background=bool(body.background),
        is_stored=body.is_stored,
    )


def _shown(job: Job, body: ResponseBody) -> dict[str, Any]:
    """Returns the request's parameters as responses show them, with their defaults."""
    format_ = body.text.format if body.text is not None else None
    choice = body.tool_choice or "auto"
    return {
        "background": bool(body.background),
        "frequency_penalty": job.params.frequency_penalty,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": job.params.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default" if body.service_tier in (None, "auto") else body.service_tier,
        "store": body.is_stored,
        "temperature": job.params.temperature,
        "text": {"format": {"type": "text"} if format_ is None else format_.shown()},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() | {"strict": bool(tool.strict)} for tool in body.functions],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": job.params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
