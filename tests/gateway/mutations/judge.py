"""Judges answers: they must be announced in the OpenAPI document, have the right format, and
name the wrong field."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from batchway_client.events import Parser
from contract.errors import ErrorCode
from tests.gateway.mutations.drawing import Request
from tests.gateway.mutations.seeds import CHANGE, QUOTE

_API = Path(__file__).parents[3] / "docs" / "api.md"
# Codes that blame a field: `param` must name it.
_BLAMES = {
    *("invalid_value", "missing_required_parameter", "unknown_parameter", "unsupported_parameter"),
    *("context_length_exceeded", "model_not_found", "unknown_lane"),
}
_OUTSIDE_THE_BODY = ("Idempotency-Key", "Last-Event-ID", "starting_after")
_MAX_NAME = 64  # characters of a field's name that `param` repeats
# How a job that was accepted may not end: the call was good, and nothing was disturbed.
FAULTS = {
    *(ErrorCode.ENGINE_ERROR, ErrorCode.POISON, ErrorCode.RETRIES, ErrorCode.PAYLOAD_LOST),
    *(ErrorCode.PAYLOAD_UNAVAILABLE, ErrorCode.PROMPT_TOO_LONG, ErrorCode.BAD_PARAMETER),
}


@dataclass(frozen=True, slots=True)
class Announced:
    """Documented errors: statuses by route, and codes."""

    statuses: dict[tuple[str, str], set[int]]
    codes: set[str]

    @classmethod
    async def read(cls, http: httpx.AsyncClient) -> "Announced":
        paths = (await http.get("/openapi.json")).json()["paths"]
        statuses = {
            (method.upper(), path): {int(status) for status in operation["responses"]}
            for path, item in paths.items()
            for method, operation in item.items()
        }
        errors = _API.read_text().partition("\n## Errors\n")[2]
        return cls(statuses, set(re.findall(r"`([a-z_]+)`", errors)))


def judge(request: Request, answer: httpx.Response, announced: Announced) -> Iterator[str]:
    """The faults of an answer."""
    if "x-request-id" not in answer.headers:
        yield "no x-request-id"
    if answer.status_code not in announced.statuses[request.method, request.path]:
        yield f"{answer.status_code} is not in the OpenAPI document"
    is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
    try:
        shown = list(_chunks(answer.text)) if is_stream else [json.loads(answer.content)]
    except (ValueError, UnicodeError) as exc:
        yield f"no JSON: {type(exc).__name__}"
        return
    if answer.status_code >= 400:
        yield from _judge_refusal(request, answer, shown[0], announced)
    elif any(item.get("error") is not None and item.get("object") != "job" for item in shown):
        yield "an error after 200"
    elif request.path not in (CHANGE, QUOTE) and not job_id_of(answer):
        yield "accepted without a job"
    elif "choices" in shown[0]:
        yield from _judge_choices(shown)


def _chunks(text: str) -> Iterator[Any]:
    """The chunks of a stream. Raises ValueError if it has no end."""
    parser = Parser()
    events = [*parser.feed(text.encode())]
    yield from [event.data for event in events]
    if not parser.is_done and events[-1].type not in ("message_stop", "error"):
        raise ValueError("the stream has no end")


def _judge_choices(shown: list[Any]) -> Iterator[str]:
    """Checks that each choice ends once."""
    reasons: dict[int, list[str]] = {}
    for choice in itertools.chain.from_iterable(item["choices"] for item in shown):
        found = reasons.setdefault(choice["index"], [])
        found += [choice["finish_reason"]] if choice["finish_reason"] is not None else []
    if sorted(reasons) != list(range(len(reasons))) or not reasons:
        yield f"choices {sorted(reasons)}"
    if any(len(found) != 1 or found[0] not in ("stop", "length") for found in reasons.values()):
        yield f"choices end with {list(reasons.values())}"


def _judge_refusal(
    request: Request, answer: httpx.Response, shown: Any, announced: Announced
) -> Iterator[str]:
    error = shown.get("error") if isinstance(shown, dict) else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        yield "not the shape of an error"
        return
    code, param = error["code"], error["param"]
    if not error["message"]:
        yield "no message"
    if code not in announced.codes:
        yield f"the code {code} is not in docs/api.md"
    if answer.status_code >= 500 and (
        answer.status_code not in (503, 529) or "x-dropped-reason" not in answer.headers
    ):
        yield f"failed: {answer.status_code} {code}"
    if code in FAULTS:
        yield f"accepted, then {code}"
    if code in _BLAMES and not _names_a_field(request, code, param):
        yield f"{code} names {param!r:.100}, which is not in the body"


def _names_a_field(request: Request, code: str, param: object) -> bool:
    """Whether `param` names a part of the body, or a missing part."""
    if param in _OUTSIDE_THE_BODY:
        return True
    if not isinstance(param, str):
        return False
    if code == "missing_required_parameter":  # its owner is there
        param = param.rpartition(".")[0]
        if not param:
            return True
    return _leads(json.loads(request.body), param)


def _leads(node: Any, path: str) -> bool:
    """Whether a path leads to a part below a node. Names may contain dots."""
    names = node if isinstance(node, dict) else map(str, range(len(node)))
    for name in names if isinstance(node, dict | list) else ():
        short = name[:_MAX_NAME]
        value = node[name] if isinstance(node, dict) else node[int(name)]
        if path == short or (
            path.startswith(f"{short}.") and _leads(value, path[len(short) + 1 :])
        ):
            return True
    return False


def job_id_of(answer: httpx.Response) -> str:
    """The id of the job that an answer created, or ''."""
    if answer.status_code == 202:
        return str(answer.json()["id"])
    return str(answer.headers.get("x-job-id", ""))


def code_of(answer: httpx.Response) -> str:
    """Status and code."""
    if answer.status_code < 400:
        return str(answer.status_code)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.json()['error']['code']}"
    return f"{answer.status_code} ?"
