"""The two clients: `Client` blocks, `AsyncClient` is for asyncio. The calls are the same."""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from typing import Any, Generic, Self, TypeVar

import httpx

from batchway_client.calls import Call, Polls, read
from batchway_client.errors import Unavailable
from batchway_client.events import Event, Parser, Position
from batchway_client.jobs import Job

_TIMEOUT = httpx.Timeout(45.0, connect=5.0)  # an idle stream sends a comment every 10 s
# Calls of this machine to itself use no proxy, whatever the environment says.
_DIRECT = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}

# What a client returns: values, or awaitables and asynchronous iterators of them.
JobT = TypeVar("JobT")
JobsT = TypeVar("JobsT")
EventsT = TypeVar("EventsT")
ContentT = TypeVar("ContentT")
NothingT = TypeVar("NothingT")


class _Calls(ABC, Generic[JobT, JobsT, EventsT, ContentT, NothingT]):
    """The calls of both clients."""

    _headers: dict[str, str]
    _max_outage_s: float

    def submit(
        self,
        endpoint: str,
        body: Mapping[str, Any],
        *,
        lane: str | None = None,
        deadline_s: float | None = None,
        start_at: float | None = None,
        retention_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        callback: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> JobT:
        """Queues a request to an endpoint, such as `/v1/chat/completions`, once even if the
        connection breaks. Times are in seconds, `start_at` is in Unix seconds.
        """
        terms = _given(
            lane=lane,
            deadline_s=deadline_s,
            start_at=start_at,
            retention_s=retention_s,
            metadata=metadata,
            callback=callback,
        )
        job = {"endpoint": endpoint, "body": body, **terms}
        key = idempotency_key or f"client-{secrets.token_hex(16)}"
        return self._job(Call("POST", "/v1/jobs", job, headers={"idempotency-key": key}))

    def get(self, job_id: str) -> JobT:
        """Returns a job, with its result once it has ended."""
        return self._job(Call("GET", f"/v1/jobs/{job_id}"))

    def list(
        self,
        *,
        status: str | None = None,
        lane: str | None = None,
        model: str | None = None,
        created_after: float | None = None,
        metadata: Mapping[str, str] | None = None,
        page_size: int | None = None,
    ) -> JobsT:
        """Yields all matching jobs, newest first, without results; fetches them page by page.
        `created_after` is in Unix seconds.
        """
        wanted = _given(
            status=status, lane=lane, model=model, created_after=created_after, limit=page_size
        )
        params = {name: str(value) for name, value in wanted.items()}
        params |= {f"metadata[{name}]": value for name, value in (metadata or {}).items()}
        return self._pages(params)

    def events(self, job_id: str, *, after: str | None = None) -> EventsT:
        """Yields a job's events from the start, or after the event with the id `after`, to its end.
        Reconnects when a connection breaks; no event is lost or repeated.
        """
        return self._follow(f"/v1/jobs/{job_id}/events", Position(after, self._max_outage_s))

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> JobT:
        """Returns the job once it has ended. Raises WaitTimeout; the job then continues."""
        return self._wait(job_id, Polls(timeout_s))

    def cancel(self, job_id: str) -> JobT:
        """Cancels a waiting or running job. Raises Conflict if it has ended in another way."""
        return self._job(Call("POST", f"/v1/jobs/{job_id}/cancel"))

    def reprioritise(
        self,
        job_id: str,
        *,
        lane: str | None = None,
        deadline_s: float | None = None,
        start_at: float | None = None,
    ) -> JobT:
        """Moves a waiting or running job to another lane or deadline (seconds from now), one that
        has not begun to another start (Unix seconds). Raises Conflict if it is too late."""
        terms = _given(lane=lane, deadline_s=deadline_s, start_at=start_at)
        return self._job(Call("PATCH", f"/v1/jobs/{job_id}", terms))

    def delete(self, job_id: str) -> NothingT:
        """Deletes an ended job: prompt, output, log. Raises Conflict if it has not ended."""
        # Not repeated: if only the answer was lost, the repeat would get 404.
        return self._nothing(Call("DELETE", f"/v1/jobs/{job_id}", may_repeat=False))

    def quote(self, endpoint: str, body: Mapping[str, Any], *, lane: str | None = None) -> ContentT:
        """Estimates the cost and the end of a request, without queueing it."""
        job = {"endpoint": endpoint, "body": body, **_given(lane=lane)}
        return self._content(Call("POST", "/v1/quote", job))

    @abstractmethod
    def _job(self, call: Call) -> JobT:
        """Sends a call whose answer is a job."""

    @abstractmethod
    def _nothing(self, call: Call) -> NothingT:
        """Sends a call whose answer says nothing."""

    @abstractmethod
    def _content(self, call: Call) -> ContentT:
        """Sends a call and returns the answer."""

    @abstractmethod
    def _pages(self, params: Mapping[str, str]) -> JobsT:
        """Yields the jobs of all pages of a list."""

    @abstractmethod
    def _follow(self, path: str, position: Position) -> EventsT:
        """Yields events until the last, over as many connections as it takes."""

    @abstractmethod
    def _wait(self, job_id: str, polls: Polls) -> JobT:
        """Looks at the job until it has ended."""


class Client(_Calls[Job, Iterator[Job], Iterator[Event], Mapping[str, Any], None]):
    """Calls a gateway or a load balancer. Methods raise AnswerError and ConnectionLost.

    `http`: an httpx client with its own base URL, for example to set proxies or certificates.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        max_outage_s: float = 60.0,
        http: httpx.Client | None = None,
    ) -> None:
        """`max_outage_s`: how long `events` tries to reach a gateway again."""
        self._http = http or httpx.Client(base_url=base_url, timeout=_TIMEOUT, mounts=_DIRECT)
        self._headers = _authorization(api_key)
        self._max_outage_s = max_outage_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _content(self, call: Call) -> dict[str, Any]:
        while True:
            try:
                return read(self._http.request(**call.arguments(self._headers)))
            except (httpx.TransportError, Unavailable) as exc:
                pause_s = call.pause_s(exc)
            time.sleep(pause_s)

    def _job(self, call: Call) -> Job:
        return Job.of(self._content(call))

    def _nothing(self, call: Call) -> None:
        self._content(call)

    def _pages(self, params: Mapping[str, str]) -> Iterator[Job]:
        page: dict[str, Any] = {"has_more": True}
        while page["has_more"]:
            page = self._content(Call("GET", "/v1/jobs", params=params))
            yield from map(Job.of, page["data"])
            params = {**params, "after": page["last_id"]}

    def _follow(self, path: str, position: Position) -> Iterator[Event]:
        while True:
            lost: Exception | None = None
            headers = self._headers | position.headers
            try:
                with self._http.stream("GET", path, headers=headers) as answer:
                    if answer.is_error:
                        answer.read()
                        read(answer)
                    parser = Parser()
                    for data in answer.iter_bytes():
                        yield from position.take(parser.feed(data))
                        if position.is_end or parser.is_empty:
                            return
            except (httpx.TransportError, Unavailable) as exc:
                lost = exc
            time.sleep(position.pause_s(lost))

    def _wait(self, job_id: str, polls: Polls) -> Job:
        while True:
            job = self.get(job_id)
            if job.has_ended:
                return job
            time.sleep(polls.pause_s(job))


class AsyncClient(
    _Calls[
        Coroutine[Any, Any, Job],
        AsyncIterator[Job],
        AsyncIterator[Event],
        Coroutine[Any, Any, Mapping[str, Any]],
        Coroutine[Any, Any, None],
    ]
):
    """`Client` for asyncio: close it with `aclose`, or use `async with`."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        max_outage_s: float = 60.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        """`max_outage_s`: how long `events` tries to reach a gateway again."""
        self._http = http or httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT, mounts=_DIRECT)
        self._headers = _authorization(api_key)
        self._max_outage_s = max_outage_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _content(self, call: Call) -> dict[str, Any]:
        while True:
            try:
                return read(await self._http.request(**call.arguments(self._headers)))
            except (httpx.TransportError, Unavailable) as exc:
                pause_s = call.pause_s(exc)
            await asyncio.sleep(pause_s)

    async def _job(self, call: Call) -> Job:
        return Job.of(await self._content(call))

    async def _nothing(self, call: Call) -> None:
        await self._content(call)

    async def _pages(self, params: Mapping[str, str]) -> AsyncIterator[Job]:
        page: dict[str, Any] = {"has_more": True}
        while page["has_more"]:
            page = await self._content(Call("GET", "/v1/jobs", params=params))
            for raw in page["data"]:
                yield Job.of(raw)
            params = {**params, "after": page["last_id"]}

    async def _follow(self, path: str, position: Position) -> AsyncIterator[Event]:
        while True:
            lost: Exception | None = None
            headers = self._headers | position.headers
            try:
                async with self._http.stream("GET", path, headers=headers) as answer:
                    if answer.is_error:
                        await answer.aread()
                        read(answer)
                    parser = Parser()
                    async for data in answer.aiter_bytes():
                        for event in position.take(parser.feed(data)):
                            yield event
                        if position.is_end or parser.is_empty:
                            return
            except (httpx.TransportError, Unavailable) as exc:
                lost = exc
            await asyncio.sleep(position.pause_s(lost))

    async def _wait(self, job_id: str, polls: Polls) -> Job:
        while True:
            job = await self.get(job_id)
            if job.has_ended:
                return job
            await asyncio.sleep(polls.pause_s(job))


def _given(**terms: Any) -> dict[str, Any]:
    """The terms that a caller gave."""
    return {name: value for name, value in terms.items() if value is not None}


def _authorization(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}
