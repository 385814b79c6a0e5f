"""Reads the ids of responses and items."""

import re

from gateway.http.errors import ApiError, not_found

_RESPONSE_ID = re.compile(r"resp_(\d{1,4}-[0-9a-f]{32})")
_ITEM_ID = re.compile(r"[a-z]{2,3}_(\d{1,4}-[0-9a-f]{32})-\d{1,6}")


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
    """The error for an unknown response; with OpenAI's own code if the call should continue it."""
    code = "response_not_found"
    if param == "previous_response_id":
        return not_found("the previous response", f"previous_{code}", param)
    return not_found("this response", code, param)
