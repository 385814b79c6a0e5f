"""Describes each HTTP request of the job API, without sending it."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchway_client.errors import AnswerError, ClientError

ATTEMPTS = 3
PAUSE_S = 0.2  # before the second attempt, doubled before the third
MAX_PAUSE_S = 2.0  # between two polls of a running job, and before an attempt
READ_TIMEOUT_S = 45.0  # an idle stream sends a comment every 10 s
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `may_repeat`: the request is idempotent and may be sent again."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    may_repeat: bool = True


def submission(
    endpoint: str, body: Mapping[str, Any], idempotency_key: str | None, terms: Mapping[str, Any]
) -> Call:
    """Creates an idempotency key if the caller gives none, so that a repeat is safe."""
    given = {name: value for name, value in terms.items() if value is not None}
    key = idempotency_key or f"client-{secrets.token_hex(16)}"
    job = {"endpoint": endpoint, "body": body, **given}
    return Call("POST", "/v1/jobs", body=job, headers={"idempotency-key": key})


def quote(endpoint: str, body: Mapping[str, Any], lane: str | None) -> Call:
    job = {"endpoint": endpoint, "body": body} | ({"lane": lane} if lane else {})
    return Call("POST", "/v1/quote", body=job)


def reading(job_id: str) -> Call:
    return Call("GET", f"/v1/jobs/{job_id}")


def cancellation(job_id: str) -> Call:
    return Call("POST", f"/v1/jobs/{job_id}/cancel")


def move(job_id: str, lane: str | None, deadline_s: float | None) -> Call:
    fields = {"lane": lane, "deadline_s": deadline_s}
    given = {name: value for name, value in fields.items() if value is not None}
    return Call("PATCH", f"/v1/jobs/{job_id}", body=given)


def deletion(job_id: str) -> Call:
    """Not repeated: if only the answer was lost, the repeat would get 404."""
    return Call("DELETE", f"/v1/jobs/{job_id}", may_repeat=False)


def listing(
    wanted: Mapping[str, object], metadata: Mapping[str, str] | None, after: str | None
) -> Call:
    params = {name: str(value) for name, value in wanted.items() if value is not None}
    params |= {f"metadata[{name}]": value for name, value in (metadata or {}).items()}
    return Call("GET", "/v1/jobs", params=params | ({"after": after} if after else {}))


def events_path(job_id: str) -> str:
    return f"/v1/jobs/{job_id}/events"


def headers_of(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def pause_s(attempt: int, error: ClientError | None) -> float:
    """Seconds to wait before attempt number `attempt`, counted from 0: the gateway's `retry-after`
    if it sent one, else growing; at most MAX_PAUSE_S."""
    asked_s = error.retry_after_s if isinstance(error, AnswerError) else None
    return min(MAX_PAUSE_S, PAUSE_S * 2 ** (attempt - 1) if asked_s is None else asked_s)
