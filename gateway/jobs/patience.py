"""How long a call is waited for before it turns into a job: by its caller's wish, or by a limit.

Knows the `Prefer` header (RFC 7240), and the time that the platform leaves a request.
"""

import math
import re
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
from fastapi import Depends, Header, Request

_WAIT = re.compile(r"wait\s*=\s*\"?(\d{1,9})\"?")
TIME_LEFT = "time_left_s"  # in a request's state: seconds until the platform ends it


class Preference(msgspec.Struct, frozen=True):
    """What `Prefer` says of waiting. What it says otherwise is ignored, as the RFC has it."""

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
        """Whether nothing is waited for at all."""
        return self.is_async and self.wait_s is None

    def applied(self) -> dict[str, str]:
        """The header that says which of it was heeded."""
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
    """Until when a call may go on as a call; `time.monotonic`, `inf` without an end."""

    result_by_s: float = math.inf  # wished: what has begun to be sent is not cut by it
    answer_by_s: float = math.inf  # the platform ends the request then

    @classmethod
    def of(
        cls, request: Request, preference: Preference, *, sync_limit_s: float, longest_s: float
    ) -> "Patience":
        """`sync_limit_s` 0: no limit but the platform's own, where it tells one. Nobody waits
        longer than `longest_s` for a wish.
        """
        now_s = time.monotonic()
        left_s = min(sync_limit_s or math.inf, request.scope["state"].get(TIME_LEFT, math.inf))
        wait_s = math.inf if preference.wait_s is None else min(preference.wait_s, longest_s)
        return cls(now_s + wait_s, now_s + left_s)

    def is_over(self, *, has_sent: bool) -> bool:
        """Whether the call must turn into a job now."""
        now_s = time.monotonic()
        return now_s >= self.answer_by_s or (now_s >= self.result_by_s and not has_sent)

    @property
    def is_wished(self) -> bool:
        """Whether the status line must wait for a result or the end of the wait."""
        return self.result_by_s < math.inf
