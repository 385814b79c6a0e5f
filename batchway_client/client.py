"""The blocking client. async_client.py is this file with `await`; a test checks that."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Self

import httpx

from batchway_client import calls
from batchway_client.errors import ClientError, ConnectionLost, Unavailable, WaitTimeout, error_of
from batchway_client.events import Event, Parser, Position
from batchway_client.jobs import Job


class Client:
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
        self._http = http or httpx.Client(
            base_url=base_url,
            timeout=httpx.Timeout(calls.READ_TIMEOUT_S, connect=calls.CONNECT_TIMEOUT_S),
        )
        self._headers = calls.headers_of(api_key)
        self._max_outage_s = max_outage_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(
        self,
        endpoint: str,
        body: Mapping[str, Any],
        *,
        lane: str | None = None,
        deadline_s: float | None = None,
        retention_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        callback: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Queues a request to an endpoint, such as `/v1/chat/completions`, once even if the
        connection breaks. Times are in seconds.
        """
        terms: dict[str, Any] = {
            "lane": lane,
            "deadline_s": deadline_s,
            "retention_s": retention_s,
            "metadata": metadata,
            "callback": callback,
        }
        return Job.of(self._ask(calls.submission(endpoint, body, idempotency_key, terms)))

    def get(self, job_id: str) -> Job:
        """Returns a job, with its result once it has ended."""
        return Job.of(self._ask(calls.reading(job_id)))

    def list(
        self,
        *,
        status: str | None = None,
        lane: str | None = None,
        model: str | None = None,
        created_after: float | None = None,
        metadata: Mapping[str, str] | None = None,
        page_size: int | None = None,
    ) -> Iterator[Job]:
        """Yields all matching jobs, newest first, without results; fetches them page by page.
        `created_after` is in Unix seconds.
        """
        wanted: dict[str, object] = {
            "status": status,
            "lane": lane,
            "model": model,
            "created_after": created_after,
            "limit": page_size,
        }
        after: str | None = None
        while True:
            page = self._ask(calls.listing(wanted, metadata, after))
            for raw in page["data"]:
                yield Job.of(raw)
            if not page["has_more"]:
                return
            after = page["last_id"]

    def events(self, job_id: str, *, after: str | None = None) -> Iterator[Event]:
        """Yields a job's events from the start, or after the event with the id `after`, to its end.
        Reconnects when a connection breaks; no event is lost or repeated.
        """
        position = Position(after)
        received_s = time.monotonic()
        while True:
            lost: Exception | None = None
            try:
                for event in self._connection(job_id, position):
                    received_s = time.monotonic()
                    position.received()
                    if position.take(event):
                        yield event
                    if event.is_end:
                        return
            except (httpx.TransportError, Unavailable) as exc:
                lost = exc
            if time.monotonic() - received_s > self._max_outage_s:
                raise ConnectionLost(f"no gateway reached for {self._max_outage_s:g} s") from lost
            time.sleep(position.next_pause_s())

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """Returns the job once it has ended. Raises WaitTimeout; the job then continues."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = calls.PAUSE_S
        while not (job := self.get(job_id)).has_ended:
            left_s = calls.MAX_PAUSE_S if end_s is None else end_s - time.monotonic()
            if left_s <= 0:
                raise WaitTimeout(f"{job_id} is {job.status} after {timeout_s:g} s")
            time.sleep(min(pause_s, left_s))
            pause_s = min(calls.MAX_PAUSE_S, pause_s * 1.5)
        return job

    def cancel(self, job_id: str) -> Job:
        """Cancels a waiting or running job. Raises Conflict if it has ended in another way."""
        return Job.of(self._ask(calls.cancellation(job_id)))

    def reprioritise(
        self, job_id: str, *, lane: str | None = None, deadline_s: float | None = None
    ) -> Job:
        """Moves a waiting or running job to another lane or deadline (seconds from now)."""
        return Job.of(self._ask(calls.move(job_id, lane, deadline_s)))

    def delete(self, job_id: str) -> None:
        """Deletes an ended job: prompt, output, log. Raises Conflict if it has not ended."""
        self._ask(calls.deletion(job_id))

    def quote(
        self, endpoint: str, body: Mapping[str, Any], *, lane: str | None = None
    ) -> Mapping[str, Any]:
        """Estimates the cost and the end of a request, without queueing it."""
        return self._ask(calls.quote(endpoint, body, lane))

    def _connection(self, job_id: str, position: Position) -> Iterator[Event]:
        """Yields the events of one connection."""
        headers = self._headers | position.headers
        path = calls.events_path(job_id)
        with self._http.stream("GET", path, headers=headers) as answer:
            if answer.status_code >= 400:
                raise error_of(answer.status_code, answer.headers, answer.read())
            parser = Parser()
            for data in answer.iter_bytes():
                yield from parser.feed(data)

    def _ask(self, call: calls.Call) -> dict[str, Any]:
        error: ClientError | None = None
        for attempt in range(calls.ATTEMPTS if call.may_repeat else 1):
            if attempt:
                time.sleep(calls.pause_s(attempt, error))
            try:
                answer = self._http.request(
                    call.method,
                    call.path,
                    params=call.params,
                    json=call.body,
                    headers={**self._headers, **call.headers},
                )
            except httpx.TransportError as exc:
                error = ConnectionLost(f"no answer ({type(exc).__name__})")
                error.__cause__ = exc
                continue
            if answer.status_code < 400:
                found: dict[str, Any] = answer.json()
                return found
            error = error_of(answer.status_code, answer.headers, answer.content)
            if not isinstance(error, Unavailable):
                break
        assert error is not None, "at least one attempt was made"
        raise error
