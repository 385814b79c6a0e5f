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
    """What is known of a job; `raw` is the whole answer. Right after a submission only its id,
    status, model, lane and `position` are.

    `result` is the endpoint's whole answer once the job has ended, `result_url` where a long one
    can be had without a key for a while. Neither stands in lists.
    """

    id: str
    status: str
    endpoint: str
    model: str
    lane: str
    metadata: Mapping[str, str]
    position: int | None
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
            error=JobError(error["code"], error["message"]) if error else None,
            result=raw.get("result"),
            result_url=raw.get("result_url"),
            raw=raw,
        )
