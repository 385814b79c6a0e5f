"""The callers of campaigns: what tenants ask, each attempt at it, and many callers side by side.

An attempt is a call of `batchway bench serve` (infra/measure/load.py) on its own connection.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from contract.connection import end_tasks
from infra.measure.load import Call, Outcome, arrive, exchange

TIERS = {"interactive": "priority", "standard": "default"}  # of the lanes whose callers wait


async def side_by_side(*coroutines: Coroutine[None, None, None]) -> None:
    """Returns once all have ended. If one fails, or the task is cancelled, all are ended for
    certain: a TaskGroup cancels only once, and a cancel can get lost in redis-py."""
    running = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*running)
    finally:
        await end_tasks(*running)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a tenant; it fixes the length of its output. `fields`: others of its body."""

    tenant: str
    lane: str
    prompt: Sequence[int] | str
    num_output: int
    fields: Mapping[str, Any] = field(default_factory=dict)

    def request(
        self, model: str, *, is_job: bool, is_stream: bool = True
    ) -> tuple[str, dict[str, Any]]:
        """Path and body: of a call, streamed or not, or of a job that nobody waits for."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.num_output,
            "ignore_eos": True,
            "service_tier": TIERS.get(self.lane, "default"),
            **self.fields,
        }
        path = "/v1/completions"
        if not is_job:
            return path, body | {"stream": is_stream, "return_token_ids": True}
        lane = {"lane": self.lane} if self.lane else {}
        return "/v1/jobs", {"endpoint": path, "body": body, **lane}


@dataclass(slots=True, kw_only=True)
class Attempt(Call):
    """One attempt at a request. Times are Unix seconds."""

    ask: Ask
    is_second: bool = False

    @property
    def is_admitted(self) -> bool:
        return self.status in (200, 202)

    @property
    def is_whole(self) -> bool:
        """Whether its answer is complete, which a stream says."""
        return self.outcome is Outcome.SUCCEEDED and (self.status == 202 or self.is_done)

    @property
    def job_id(self) -> str:
        return self.headers.get("x-job-id", "")

    @property
    def retry_after_s(self) -> float | None:
        found = self.headers.get("retry-after")
        return None if found is None else float(found)

    @property
    def admission_s(self) -> float | None:
        """As the gateway reports it."""
        parts = self.headers.get("server-timing", "").split(", ")
        durations = dict(part.partition(";dur=")[::2] for part in parts)
        return float(durations["admission"]) / 1000 if "admission" in durations else None


@dataclass
class Callers:
    """Makes the calls of a campaign. `urls` are the gateways', `api_keys` has one for each tenant,
    `follow_share` of those that are told when to come back do so, once."""

    urls: Sequence[str]
    model: str
    api_keys: Mapping[str, str] = field(default_factory=dict)
    seed: int = 1
    timeout_s: float = 120.0
    follow_share: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)
    num_told_later: int = 0  # callers told to come back later than `stop_coming`
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.seed} callers")
        self._stopped = asyncio.Event()
        self._http = httpx.AsyncClient(transport=OneConnectionEach())

    async def aclose(self) -> None:
        """Cancels all running calls."""
        await end_tasks(*self._tasks)

    async def send_all(self, asks: Iterable[tuple[float, Ask]]) -> None:
        """Sends each request at its time, without waiting for earlier ones. Returns after the
        last is sent."""
        start_s = time.time()
        due = ((start_s + at_s, (start_s + at_s, ask)) for at_s, ask in asks)
        await arrive(due, self._begin, time.time)

    def num_unanswered(self) -> int:
        """First attempts whose response has not begun."""
        return sum(not (one.is_second or one.status or one.reason) for one in self.attempts)

    def stop_coming(self) -> None:
        """From now on no rejected caller comes back."""
        self._stopped.set()

    async def until_answered(self) -> None:
        """Returns once all calls are complete, second attempts included."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def call(
        self,
        ask: Ask,
        *,
        is_job: bool = False,
        is_stream: bool = True,
        hang_up_after: int | None = None,
        due_s: float | None = None,
        is_second: bool = False,
    ) -> Attempt:
        """One attempt, to the end of its response, or to `hang_up_after` pieces of a stream."""
        due_s = time.time() if due_s is None else due_s
        number = len(self.attempts)
        attempt = Attempt(number, len(ask.prompt), due_s, due_s, ask=ask, is_second=is_second)
        self.attempts.append(attempt)
        path, body = ask.request(self.model, is_job=is_job, is_stream=is_stream)
        key = self.api_keys.get(ask.tenant)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = self._rng.choice(self.urls) + path
        terms: dict[str, Any] = {"headers": headers, "hang_up_after": hang_up_after}
        try:
            async with asyncio.timeout(self.timeout_s):
                await exchange(self._http, attempt, url, body, time.time, **terms)
        except TimeoutError as exc:
            attempt.outcome, attempt.reason = Outcome.FAILED, type(exc).__name__
        if attempt.status == 200 and not is_stream:  # `exchange` has looked for events
            attempt.outcome, attempt.reason, attempt.is_done = Outcome.SUCCEEDED, "", True
        return attempt

    def _begin(self, due: tuple[float, Ask]) -> None:
        task = asyncio.create_task(self._call_and_follow(*due))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call_and_follow(self, due_s: float, ask: Ask) -> None:
        """Calls; jobs in lanes whose callers do not wait."""
        is_job = ask.lane not in TIERS
        first = await self.call(ask, is_job=is_job, due_s=due_s)
        wait_s = first.retry_after_s
        if first.is_admitted or wait_s is None or self._rng.random() >= self.follow_share:
            return
        try:
            await asyncio.wait_for(self._stopped.wait(), wait_s)
            self.num_told_later += 1
        except TimeoutError:
            await self.call(ask, is_job=is_job, is_second=True)


class OneConnectionEach(httpx.AsyncBaseTransport):
    """A connection for each request, over HTTP/1.0, where its end is that of the answer. A load
    generator must cost less than what is under load: in a pool of connections the cost of a call
    grows with their number."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        own = {b"connection", b"accept-encoding"}
        lines = [b"%s: %s" % pair for pair in request.headers.raw if pair[0].lower() not in own]
        first = f"{request.method} {request.url.raw_path.decode()} HTTP/1.0".encode()
        try:
            reader, writer = await asyncio.open_connection(request.url.host, request.url.port)
        except OSError as exc:
            raise httpx.ConnectError(type(exc).__name__) from exc
        rest = _Rest(reader, writer)
        try:
            writer.write(b"\r\n".join([first, *lines, b"", request.content]))
            status, *heads = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        except (OSError, EOFError) as exc:
            writer.close()
            raise httpx.ReadError(type(exc).__name__) from exc
        except BaseException:
            writer.close()
            raise
        pairs = [(name, value.strip()) for name, _, value in (h.partition(":") for h in heads if h)]
        return httpx.Response(int(status.split()[1]), headers=pairs, stream=rest)


@dataclass(frozen=True, slots=True)
class _Rest(httpx.AsyncByteStream):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while data := await self.reader.read(2**16):
                yield data
        except OSError as exc:
            raise httpx.ReadError(type(exc).__name__) from exc

    async def aclose(self) -> None:
        self.writer.close()
