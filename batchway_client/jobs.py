"""A job as the gateway shows it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

TERMINAL = frozenset({"succeeded", "failed", "cancelled", "expired"})


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a job failed."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Job:
    """The state of a job; `raw` is the gateway's whole response. A submission returns only id,
    status, endpoint, model, lane, `position` and the wait for a worker.

    `waiting_for` is "worker" while no worker of the model is ready, and `expected_start_s` the
    seconds until one should be, if that is known.
    `result` is the endpoint's response once the job has ended; for a long result, `result_url` is
    a temporary URL that needs no key. Lists contain neither.
    """

    id: str
    status: str
    endpoint: str
    model: str
    lane: str
    metadata: Mapping[str, str]
    position: int | None
    waiting_for: str | None
    expected_start_s: float | None
    error: JobError | None
    result: Mapping[str, Any] | None
    result_url: str | None
    raw: Mapping[str, Any]

    @property
    def has_ended(self) -> bool:
        return self.status in TERMINAL

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        error = raw.get("error")
        return cls(
            id=raw["id"],
            status=raw["status"],
            endpoint=raw["endpoint"],
            model=raw["model"],
            lane=raw["lane"],
            metadata=raw.get("metadata") or {},
            position=raw.get("position"),
            waiting_for=raw.get("waiting_for"),
            expected_start_s=raw.get("expected_start_s"),
            error=JobError(error["code"], error["message"]) if error else None,
            result=raw.get("result"),
            result_url=raw.get("result_url"),
            raw=raw,
        )
