"""Turns a response's call into a job."""

from typing import Any

import msgspec

from contract.function_types import Submission
from contract.jobs import Endpoint, Job
from contract.response_records import Item, ResponseRecord, encode_record, item_id
from gateway.http.errors import ApiError, invalid_value
from gateway.prepare.admission import Terms
from gateway.prepare.calls import prepare_call
from gateway.prepare.conversations import conversation, to_messages
from gateway.prepare.response_bodies import ResponseBody, renamed
from gateway.state import Gateway


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
