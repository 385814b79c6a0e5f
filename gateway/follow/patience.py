"""How long a synchronous call may last before it becomes a job: limited by the `Prefer` header (RFC
7240) or by the platform."""

import math
import re
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
from fastapi import Depends, Header, Request

_WAIT = re.compile(r"wait\s*=\s*\"?(\d{1,9})\"?")
TIME_LEFT = "time_left_s"  # key in the request's state: seconds until the platform ends the request


class Preference(msgspec.Struct, frozen=True):
    """The `Prefer` header's wishes about waiting. Others are ignored, as the RFC says."""

    is_async: bool = False
    wait_s: int | None = None

    @classmethod
    def of(cls, headers: Sequence[str]) -> "Preference":
        words = ",".join(headers).lower().split(",")
        parts = [word.partition(";")[0].strip() for word in words]
        waits = [match for part in parts if (match := _WAIT.fullmatch(part))]
        return cls("respond-async" in parts, int(waits[0][1]) if waits else None)

    @property
    def is_given(self) -> bool:
        return self.is_async or self.wait_s is not None

    @property
    def is_at_once(self) -> bool:
        """Whether the response is 202 without waiting."""
        return self.is_async and self.wait_s is None

    def applied(self) -> dict[str, str]:
        """The `Preference-Applied` header."""
        parts = ["respond-async"] if self.is_async else []
        parts += [] if self.wait_s is None else [f"wait={self.wait_s}"]
        return {"preference-applied": ", ".join(parts)} if parts else {}


async def preference_of(
    prefer: Annotated[
        list[str] | None,
        Header(description="`respond-async`: 202 at once; `wait=20`: 202 after 20 s"),
    ] = None,
) -> Preference:
    return Preference.of(prefer or [])


AskedPreference = Annotated[Preference, Depends(preference_of)]


class Patience(msgspec.Struct, frozen=True):
    """The time (`time.monotonic`) until which a call may last; `inf`: unlimited."""

    result_by_s: float = math.inf  # by the client's wish; does not end a stream that has begun
    answer_by_s: float = math.inf  # by the platform, which ends the request then

    @classmethod
    def of(
        cls, request: Request, preference: Preference, *, sync_limit_s: float, longest_s: float
    ) -> "Patience":
        """Computes the time limit. `sync_limit_s` 0: no limit except the platform's, if it reports
        one. A client's wish is limited to `longest_s`."""
        now_s = time.monotonic()
        left_s = min(sync_limit_s or math.inf, request.scope["state"].get(TIME_LEFT, math.inf))
        wait_s = math.inf if preference.wait_s is None else min(preference.wait_s, longest_s)
        return cls(now_s + wait_s, now_s + left_s)

    def is_over(self, *, has_sent: bool) -> bool:
        """Whether the call must become a job now."""
        now_s = time.monotonic()
        return now_s >= self.answer_by_s or (now_s >= self.result_by_s and not has_sent)

    @property
    def is_wished(self) -> bool:
        """Whether the response must not begin before the result or the end of the wait."""
        return self.result_by_s < math.inf
