"""Turns a response's call into a job: the items that the model receives, those of the previous
response and of the call, become messages of a chat."""

from collections.abc import Sequence
from typing import Any

import msgspec

from contract.function_types import Submission
from contract.jobs import Endpoint, Job
from contract.response_events import Item, ResponseRecord, encode_record, item_id
from gateway.follow.stored_responses import ended_response, read_response, response_of_item
from gateway.http.errors import ApiError, bad_request, invalid_value, not_found
from gateway.prepare.admission import Terms
from gateway.prepare.calls import prepare_call
from gateway.prepare.response_bodies import ItemReference, ResponseBody, renamed
from gateway.state import Gateway

MAX_REFERENCED = 16  # responses that one call refers to by their items
_PREVIOUS = "previous_response_id"


async def conversation(gateway: Gateway, tenant: str, body: ResponseBody) -> list[Item]:
    """Returns all items that the model receives. Items of earlier responses keep their ids. Raises
    ApiError: 404 if an id is unknown, belongs to another tenant, or has expired."""
    items: list[Item] = []
    if body.previous_response_id is not None:
        items += await _items_after(gateway, body.previous_response_id, tenant)
    known: dict[str, dict[str, Item]] = {}  # by response and id
    for i, item in enumerate(body.input):
        if not isinstance(item, ItemReference):
            own = {} if item.id is None else {"id": item.id}
            items.append(own | item.kept())
            continue
        param = f"input.{i}.id"
        response = response_of_item(item.id)
        if response is None:
            raise not_found("this item", "item_not_found", param)
        if response not in known:
            if len(known) == MAX_REFERENCED:
                message = f"input: refers to items of more than {MAX_REFERENCED} responses"
                raise invalid_value("input", message)
            found = await _items_after(gateway, response, tenant, param)
            known[response] = {each["id"]: each for each in found}
        if item.id not in known[response]:
            raise not_found("this item", "item_not_found", param)
        items.append(known[response][item.id])
    return items


async def _items_after(
    gateway: Gateway, response_id: str, tenant: str, param: str = _PREVIOUS
) -> list[Item]:
    """The items of a response, input and output. Raises ApiError."""
    view, record = await read_response(gateway, response_id, tenant, param)
    if not view.is_terminal:
        raise bad_request("response_not_ended", f"{param}: that response has not ended yet", param)
    response = await ended_response(gateway, view, record)
    if response["status"] not in ("completed", "incomplete"):
        message = f"{param}: that response is {response['status']}"
        raise invalid_value(param, message)
    return [*record.items, *map(_without_logprobs, response["output"])]


def _without_logprobs(item: Item) -> Item:
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]}


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
                last["content"] = _text(item)
            case "message":
                messages.append({"role": item["role"], "content": _text(item)})
            case "function_call":
                if last is None:
                    last = {"role": "assistant"}
                    messages.append(last)
                last.setdefault("tool_calls", []).append(_call(item))
            case "function_call_output":
                own = {"tool_call_id": item["call_id"], "content": item["output"]}
                messages.append({"role": "tool", **own})
    return messages


_UNSPOKEN = {"role", "reasoning_content"}


def _text(item: Item) -> str:
    return "\n".join(part["text"] for part in item["content"])


def _call(item: Item) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


async def prepare_response(
    gateway: Gateway, body: ResponseBody, terms: Terms
) -> tuple[Job, Submission]:
    """Returns the job, which contains the request, and its submission. The response's metadata is
    also the job's, unless `terms` have other values. Raises ApiError."""
    metadata = {**(body.metadata or {}), **terms.metadata}
    terms = msgspec.structs.replace(terms, metadata=metadata)
    items = await conversation(gateway, terms.caller.tenant, body)
    chat = body.chat(to_messages(items))
    try:
        job, submission = await prepare_call(gateway, Endpoint.RESPONSES, chat, terms)
    except ApiError as exc:
        raise renamed(exc) from None
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
        "text": {
            "format": {"type": "text"}
            if format_ is None
            else format_.model_dump(by_alias=True, exclude_unset=True)
        },
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() | {"strict": bool(tool.strict)} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": job.params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
