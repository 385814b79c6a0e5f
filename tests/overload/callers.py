"""Callers over HTTP: streaming calls, queued jobs; a share follows Retry-After once.

Records the result of each; the report judges them.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from contract.connection import end_tasks
from tests.endurance.pool import MODEL
from tests.overload.arrivals import Ask
from tests.overload.posting import Answer, Broken, posting

FOLLOWERS = 0.5  # share of rejected callers that come back when told
_TIMEOUT_S = 120.0
_TIER = {"interactive": "priority", "standard": "default"}


@dataclass(slots=True)
class Call:
    """One attempt. Times in seconds; `sent_s` is Unix time, `lag_s` the caller's own delay."""

    ask: Ask
    sent_s: float
    lag_s: float
    is_second: bool = False
    status: int = 0
    reason: str = ""  # x-dropped-reason, or the error
    answer_s: float = 0.0  # until the head of the response
    admission_s: float | None = None  # as the gateway reports it
    retry_after_s: float | None = None
    job_id: str = ""
    ttft_s: float | None = None
    num_tokens: int = 0
    is_whole: bool = False  # its stream is complete

    @property
    def is_admitted(self) -> bool:
        return self.status in (200, 202)

    @property
    def is_streamed(self) -> bool:
        return self.ask.lane in _TIER


@dataclass
class Callers:
    """All calls of a campaign. `urls` are the gateways', `api_keys` has one for each tenant."""

    urls: list[str]
    api_keys: Mapping[str, str]
    seed: int
    calls: list[Call] = field(default_factory=list)
    num_told_later: int = 0  # callers told to come back later than `stop_coming`
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.seed} callers")
        self._stopped = asyncio.Event()

    async def aclose(self) -> None:
        """Cancels all running calls."""
        await end_tasks(*self._tasks)

    async def send_all(self, asks: Iterator[tuple[float, Ask]]) -> None:
        """Sends each request at its time, without waiting for earlier ones. Returns after the
        last is sent."""
        start_s = time.monotonic()
        for at_s, ask in asks:
            wait_s = start_s + at_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._begin(ask, lag_s=max(0.0, -wait_s))

    def num_unanswered(self) -> int:
        """First attempts whose response has not begun."""
        return sum(not (call.is_second or call.status or call.reason) for call in self.calls)

    def stop_coming(self) -> None:
        """From now on no rejected caller comes back."""
        self._stopped.set()

    async def until_answered(self) -> None:
        """Returns once all calls are complete, second attempts included."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def call(self, ask: Ask, *, lag_s: float = 0.0, is_second: bool = False) -> Call:
        """One attempt, to the end of its response."""
        call = Call(ask, time.time(), lag_s, is_second)
        self.calls.append(call)
        path, body = _request(ask)
        url = self._rng.choice(self.urls) + path
        started_s = time.monotonic()
        try:
            key = self.api_keys[ask.tenant]
            async with posting(url, body, api_key=key, timeout_s=_TIMEOUT_S) as answer:
                call.answer_s = time.monotonic() - started_s
                note_head(call, answer)
                if call.status == 200:
                    await read_stream(call, answer, started_s)
                elif call.status == 202:
                    call.job_id = (await answer.read_json())["id"]
                    call.is_whole = True
        except Broken as broken:
            call.reason = str(broken)
        return call

    def _begin(self, ask: Ask, lag_s: float) -> None:
        task = asyncio.create_task(self._call_and_follow(ask, lag_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call_and_follow(self, ask: Ask, lag_s: float) -> None:
        call = await self.call(ask, lag_s=lag_s)
        if call.is_admitted or call.retry_after_s is None or self._rng.random() >= FOLLOWERS:
            return
        try:
            await asyncio.wait_for(self._stopped.wait(), call.retry_after_s)
            self.num_told_later += 1
        except TimeoutError:
            await self.call(ask, is_second=True)


def _request(ask: Ask) -> tuple[str, dict[str, Any]]:
    """Path and body of a request."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": list(ask.prompt_ids),
        "max_tokens": ask.num_output,
        "ignore_eos": True,
    }
    if ask.lane in _TIER:
        body |= {"stream": True, "service_tier": _TIER[ask.lane], "return_token_ids": True}
        return "/v1/completions", body
    return "/v1/jobs", {"endpoint": "/v1/completions", "body": body, "lane": ask.lane}


def note_head(call: Call, answer: Answer) -> None:
    headers = answer.headers
    call.status = answer.status
    call.reason = headers.get("x-dropped-reason", "")
    call.job_id = headers.get("x-job-id", "")
    if "retry-after" in headers:
        call.retry_after_s = float(headers["retry-after"])
    for part in headers.get("server-timing", "").split(", "):
        name, _, duration = part.partition(";dur=")
        if name == "admission":
            call.admission_s = float(duration) / 1000


async def read_stream(call: Call, answer: Answer, started_s: float) -> None:
    """Reads a stream; counts its tokens and records its end."""
    async for line in answer.lines():
        if line == "data: [DONE]":
            call.is_whole = True
        elif line.startswith("data: "):
            data = json.loads(line[6:])
            num_tokens = sum(len(c.get("token_ids") or ()) for c in data.get("choices", ()))
            if num_tokens and call.ttft_s is None:
                call.ttft_s = time.monotonic() - started_s
            call.num_tokens += num_tokens
            call.reason = data.get("error", {}).get("code", call.reason)
