"""Makes the record of a new response, and reads the ids of responses and items."""

import re
from typing import Any

from contract.jobs import Job
from contract.response_records import Item, ResponseRecord, item_id
from gateway.http.errors import ApiError, not_found
from gateway.openai.responses.bodies import ResponseBody

_RESPONSE_ID = re.compile(r"resp_(\d{1,4}-[0-9a-f]{32})")
_ITEM_ID = re.compile(r"[a-z]{2,3}_(\d{1,4}-[0-9a-f]{32})-\d{1,6}")


def record_of(job: Job, body: ResponseBody, items: list[Item]) -> ResponseRecord:
    """The record of a new job; its items get ids where the caller gave none."""
    return ResponseRecord(
        shown=_shown(job, body),
        items=[{"id": item_id(job, item["type"], i)} | item for i, item in enumerate(items)],
        is_background=bool(body.background),
        is_stored=body.is_stored,
    )


def job_of_response(response_id: str, param: str | None = None) -> str:
    """The id of a response's job. Raises ApiError, as for an unknown response."""
    found = _RESPONSE_ID.fullmatch(response_id)
    if found is None:
        raise no_such_response(param)
    return f"job-{found[1]}"


def response_of_item(item_id: str) -> str | None:
    """The response that gave an item its id; None for ids of others."""
    found = _ITEM_ID.fullmatch(item_id)
    return f"resp_{found[1]}" if found else None


def no_such_response(param: str | None = None) -> ApiError:
    """With OpenAI's code for one that was to be continued."""
    code = "response_not_found"
    if param == "previous_response_id":
        return not_found("the previous response", f"previous_{code}", param)
    return not_found("this response", code, param)


def _shown(job: Job, body: ResponseBody) -> dict[str, Any]:
    """The request's parameters as responses show them, with their defaults."""
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
