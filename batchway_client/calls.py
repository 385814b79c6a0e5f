"""A request of the job API, and the pauses between its attempts and between looks at a job."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from batchway_client.errors import (
    AnswerError,
    ConnectionLost,
    Unavailable,
    WaitTimeout,
    error_of,
)
from batchway_client.jobs import Job

_ATTEMPTS = 3
_PAUSE_S = 0.2  # before the second attempt, doubled before the third
_MAX_PAUSE_S = 2.0  # between two polls of a running job, and before an attempt

# What an attempt may raise that another one may not.
Passing = httpx.TransportError | Unavailable


@dataclass(slots=True)
class Call:
    """One request. `may_repeat`: the request is idempotent and may be sent again."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    may_repeat: bool = True
    _num_failed: int = 0

    def arguments(self, headers: Mapping[str, str]) -> dict[str, Any]:
        """The arguments of `request` of an httpx client; `headers` are those of all requests."""
        return {
            "method": self.method,
            "url": self.path,
            "params": self.params,
            "json": self.body,
            "headers": {**headers, **self.headers},
        }

    def pause_s(self, error: Passing) -> float:
        """The seconds until the next attempt: the gateway's `retry-after` if it sent one, else
        growing. Raises ConnectionLost or the error if there is none."""
        self._num_failed += 1
        if self._num_failed >= (_ATTEMPTS if self.may_repeat else 1):
            if isinstance(error, AnswerError):
                raise error
            raise ConnectionLost(f"no answer ({type(error).__name__})") from error
        asked_s = error.retry_after_s if isinstance(error, AnswerError) else None
        grown_s = _PAUSE_S * 2 ** (self._num_failed - 1)
        return min(_MAX_PAUSE_S, grown_s if asked_s is None else asked_s)


def read(answer: httpx.Response) -> dict[str, Any]:
    """The content of a response. Raises AnswerError."""
    if answer.is_error:
        raise error_of(answer.status_code, answer.headers, answer.content)
    content: dict[str, Any] = answer.json()
    return content


class Polls:
    """Growing pauses between looks at a job, until `timeout_s` has passed; None: for ever."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()
        self._pause_s = _PAUSE_S

    def pause_s(self, job: Job) -> float:
        """The seconds until the next look. Raises WaitTimeout."""
        left_s = _MAX_PAUSE_S
        if self._timeout_s is not None:
            left_s = self._began_s + self._timeout_s - time.monotonic()
            if left_s <= 0:
                raise WaitTimeout(f"{job.id} is {job.status} after {self._timeout_s:g} s")
        pause_s = min(self._pause_s, left_s)
        self._pause_s = min(_MAX_PAUSE_S, self._pause_s * 1.5)
        return pause_s
