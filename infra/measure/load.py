"""Sends load to any server with OpenAI's completions API, a streamed HTTP call for each request: at
given times, or by a fixed number of callers."""

import asyncio
import enum
import itertools
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from batchway_client.events import Parser
from infra.measure.workloads import Workload, WorkloadRequest

PromptKind = Literal["ids", "text", "chat"]
Sleep = Callable[[float], Awaitable[object]]

KEY_VARIABLES = ("BATCHWAY_API_KEY", "OPENAI_API_KEY")
_SHED_STATUSES = (429, 503)
_WORDS = ("one", "day", "the", "sea", "was", "low", "and", "old", "men", "sat", "by", "a", "red")


def authorization() -> dict[str, str]:
    """Returns the header with the API key of the environment, if there is one."""
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    return {"authorization": f"Bearer {key}"} if key else {}


class Outcome(enum.StrEnum):
    """How a call ended. Shed: refused with 429 or 503 before its first token."""

    SUCCEEDED = "succeeded"
    SHED = "shed"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(slots=True)
class Call:
    """A call. Times are seconds from the start of the run; `arrival_s` is when it was due.
    `chunk_times_s` has one entry per piece of output; `token_ids` may be missing in answers."""

    number: int
    num_prompt_tokens: int
    arrival_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    outcome: Outcome = Outcome.FAILED
    reason: str = ""
    status: int = 0
    num_output_tokens: int = 0
    chunk_times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    head_s: float = 0.0  # from sending to the head of the answer
    headers: Mapping[str, str] = field(default_factory=dict)  # of the answer
    is_done: bool = False  # its stream said so

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token."""
        return self.chunk_times_s[0] - self.arrival_s if self.chunk_times_s else None

    @property
    def ttft_from_sending_s(self) -> float | None:
        return self.chunk_times_s[0] - self.sent_s if self.chunk_times_s else None

    @property
    def itls_s(self) -> list[float]:
        """From each piece of output to the next."""
        return [b - a for a, b in itertools.pairwise(self.chunk_times_s)]

    @property
    def mean_itl_s(self) -> float | None:
        """Time per token after the first, independent of chunking."""
        if self.num_output_tokens < 2 or not self.chunk_times_s:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From arrival to the end of the answer."""
        return self.end_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class LoadClient:
    """Calls one server. `is_plain` sends only OpenAI's own fields."""

    client: httpx.AsyncClient
    model: str
    prompt_kind: PromptKind = "ids"
    is_plain: bool = False

    def request_of(self, request: WorkloadRequest) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self.is_plain:
            body |= {"ignore_eos": True, "return_token_ids": True}
        if self.prompt_kind == "ids":
            return "completions", body | {"prompt": list(request.prompt_token_ids)}
        text = " ".join(_WORDS[i % len(_WORDS)] for i in request.prompt_token_ids)
        if self.prompt_kind == "text":
            return "completions", body | {"prompt": text}
        return "chat/completions", body | {"messages": [{"role": "user", "content": text}]}


async def exchange(
    client: httpx.AsyncClient,
    call: Call,
    path: str,
    body: Mapping[str, Any],
    now_s: Callable[[], float] = time.monotonic,
    *,
    headers: Mapping[str, str] | None = None,
    hang_up_after: int | None = None,
) -> None:
    """Sends a call, or a job; records it to its end, or to `hang_up_after` pieces of output."""
    call.sent_s, began_s = now_s(), time.monotonic()
    try:
        async with client.stream("POST", path, json=body, headers=headers) as response:
            call.status, call.headers = response.status_code, response.headers
            call.head_s = time.monotonic() - began_s
            if response.status_code == 200:
                await _read(call, response, now_s, hang_up_after)
            elif response.status_code == 202:
                await response.aread()
                call.outcome = Outcome.SUCCEEDED
            else:
                await _refused(call, response)
    except (httpx.HTTPError, ValueError) as exc:  # ValueError: an event is no JSON
        call.outcome, call.reason = Outcome.FAILED, type(exc).__name__
    call.end_s = now_s()


async def _read(
    call: Call, response: httpx.Response, now_s: Callable[[], float], hang_up_after: int | None
) -> None:
    """Reads a stream and records it."""
    parser, num_reported, is_finished = Parser(), None, False
    async for part in response.aiter_bytes():
        for data in (event.data for event in parser.feed(part)):
            if "error" in data:
                call.reason = _reason(data["error"])
                is_cancelled = call.reason == "cancelled"
                call.outcome = Outcome.CANCELLED if is_cancelled else Outcome.FAILED
                return
            if usage := data.get("usage"):
                num_reported = usage["completion_tokens"]
                call.num_prompt_tokens = usage["prompt_tokens"]
            for choice in data.get("choices") or ():
                text = choice.get("text") or (choice.get("delta") or {}).get("content")
                token_ids = choice.get("token_ids")
                if text or token_ids:
                    call.chunk_times_s.append(now_s())
                    call.num_output_tokens += len(token_ids) if token_ids else 1
                    call.token_ids += token_ids or ()
                is_finished |= choice.get("finish_reason") is not None
            if hang_up_after is not None and len(call.chunk_times_s) >= hang_up_after:
                call.outcome, call.reason = Outcome.CANCELLED, "hung up"
                return
        call.is_done = parser.is_done
    if num_reported is not None:
        call.num_output_tokens = num_reported
    if is_finished:
        call.outcome = Outcome.SUCCEEDED
    else:
        call.outcome, call.reason = Outcome.FAILED, "ended early"


async def _refused(call: Call, response: httpx.Response) -> None:
    is_shed = response.status_code in _SHED_STATUSES
    call.outcome = Outcome.SHED if is_shed else Outcome.FAILED
    await response.aread()
    try:
        code = _reason(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        code = "no reason given"
    call.reason = response.headers.get("x-dropped-reason") or f"{response.status_code} {code}"


def _reason(error: Any) -> str:
    """The code of an error object. Never its message: that may quote the prompt."""
    code = (error.get("code") or error.get("type")) if isinstance(error, dict) else None
    return str(code or "error")


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. An open loop sends at arrival times, independently of earlier requests;
    `max_concurrency`, if given, delays calls. A closed loop sends the next request as soon as one
    of `max_concurrency` callers is free."""

    workload: Workload
    is_open: bool
    max_concurrency: int | None
    rate_per_s: float | None = None
    hang_up_share: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        """A short name for tables and plots."""
        if self.rate_per_s is not None:
            return f"{self.rate_per_s:g}/s"
        return "as traced" if self.is_open else f"{self.max_concurrency} callers"


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The results of a load; one call per request, in the workload's order. `wall_s` is from the
    start, the origin of arrival times, to the end of the last call."""

    load: Load
    calls: tuple[Call, ...]
    wall_s: float

    def raise_failures(self) -> None:
        """Raises RuntimeError with the reasons if a call was not answered."""
        failed = [call.reason for call in self.calls if call.outcome is not Outcome.SUCCEEDED]
        if failed:
            reasons = ", ".join(sorted(set(failed)))
            raise RuntimeError(f"{len(failed)} of {len(self.calls)} calls failed: {reasons}")


async def run_load(
    caller: LoadClient,
    load: Load,
    *,
    clock_s: Callable[[], float] = time.monotonic,
    sleep: Sleep = asyncio.sleep,
    progress: Callable[[Call], None] = lambda call: None,
) -> LoadRun:
    """Sends the load. Returns once all calls have ended."""
    start_s = clock_s()

    def now_s() -> float:
        return clock_s() - start_s

    requests = load.workload.requests
    calls = [Call(i, len(r.prompt_token_ids), r.arrival_s) for i, r in enumerate(requests)]
    hang_ups = _hang_ups(load)
    permits = asyncio.Semaphore(load.max_concurrency or len(requests))

    async def make(call: Call) -> None:
        """Makes a call once the semaphore permits; in a closed loop it arrives at that time."""
        async with permits:
            if not load.is_open:
                call.arrival_s = now_s()
            path, body = caller.request_of(requests[call.number])
            hang_up_after = hang_ups[call.number]
            await exchange(caller.client, call, path, body, now_s, hang_up_after=hang_up_after)
        progress(call)

    async with asyncio.TaskGroup() as group:
        in_order = sorted(calls, key=lambda call: call.arrival_s)
        arrivals = ((call.arrival_s if load.is_open else 0.0, call) for call in in_order)
        await arrive(arrivals, lambda call: group.create_task(make(call)), now_s, sleep)
    return LoadRun(load, tuple(calls), now_s())


async def arrive(
    arrivals: Iterable[tuple[float, Any]],
    begin: Callable[[Any], object],
    now_s: Callable[[], float],
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Begins each at its time, whatever has become of those before it."""
    for at_s, each in arrivals:
        if (wait_s := at_s - now_s()) > 0:
            await sleep(wait_s)
        begin(each)


def _hang_ups(load: Load) -> list[int | None]:
    """For each request, after how many pieces of output its caller hangs up; None: never."""
    rng = random.Random(f"{load.seed} hang-ups")
    return [
        rng.randint(1, max(1, request.max_tokens // 2))
        if rng.random() < load.hang_up_share
        else None
        for request in load.workload.requests
    ]
