"""The base of all clients: picks a gateway, possibly a dead one, calls it over plain HTTP, reads
events, and reports to the ledger.

The requests are in tests/chaos/clients.py.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from batchway_client.events import Event as Sse
from batchway_client.events import Parser
from tests.chaos.ledger import Event, Kind, Ledger, Story
from tests.chaos.oracles import Ask, Oracle

TIMEOUT = httpx.Timeout(connect=1.0, read=4.0, write=2.0, pool=None)
_PASSING = {"draining", "broker_unavailable", "no_workers", "lane_full"}  # codes: try again
_LOST = {"job_not_found", "job_lost"}


class Broken(Exception):
    """The connection or its gateway failed. The client tries again, perhaps at another gateway."""


class Gone(Exception):
    """The gateway does not know the job."""


class Callers:
    """What all clients share: the gateways, the oracle, the ledger, and the receiver of
    callbacks."""

    def __init__(
        self,
        gateway_urls: Callable[[], Sequence[str]],
        oracle: Oracle,
        ledger: Ledger,
        receiver_urls: Sequence[str],
        api_keys: Sequence[str] = (),
    ) -> None:
        self.api_keys = api_keys  # which clients use in turn; (): none
        self.ledger = ledger
        self.oracle = oracle
        self.is_over = asyncio.Event()
        self.http = httpx.AsyncClient(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None))
        self._gateway_urls = gateway_urls
        self.receiver_urls = receiver_urls

    def url(self, rng: random.Random) -> str:
        return rng.choice(self._gateway_urls())


class Client:
    """One caller, which plays story after story until the campaign ends."""

    kind = ""

    def __init__(self, callers: Callers, number: int, seed: int) -> None:
        self._callers = callers
        self._ledger = callers.ledger
        self._rng = random.Random(f"{seed} {self.kind} {number}")
        self._name = f"{self.kind}-{number}"
        self._num_stories = 0
        keys = callers.api_keys
        key = keys[self._rng.randrange(len(keys))] if keys else ""
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    async def run(self) -> None:
        while not self._callers.is_over.is_set():
            self._num_stories += 1
            ask = self.draw()
            story = self._ledger.open(
                f"{self._name}-{self._num_stories}",
                ask.expected,
                asked=ask.asked,
                is_exact=self._callers.oracle.is_exact,
                may_be_cancelled=self.may_cancel,
            )
            self._ledger.counts[f"{self.kind} stories"] += 1
            await self._patiently(story, self.live(story, ask))

    patience_s = 240.0  # for one story, faults included; then it counts as lost
    may_cancel = False
    asks_for_ids = True  # of events: by a key

    def draw(self) -> Ask:
        return self._callers.oracle.draw(self._rng)

    async def live(self, story: Story, ask: Ask) -> None:
        """One request from its beginning to its end."""
        raise NotImplementedError

    async def _patiently(self, story: Story, life: Any) -> None:
        try:
            async with asyncio.timeout(self.patience_s):
                await life
        except TimeoutError:
            story.violate(Kind.LOST, f"no end within {self.patience_s:.0f} s")

    # --- one exchange -------------------------------------------------------------------------

    async def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A definite response. Raises Broken, Gone."""
        headers = {**self._headers, **options.pop("headers", {})}
        try:
            answer = await self._callers.http.request(
                method, self._callers.url(self._rng) + path, headers=headers, **options
            )
        except httpx.HTTPError as exc:
            raise Broken(type(exc).__name__) from exc
        self.refuse(answer)
        return answer

    def refuse(self, answer: httpx.Response) -> None:
        if answer.status_code < 400 or answer.status_code == 409:
            return
        code = answer.json()["error"]["code"]
        self._ledger.counts[f"answered {answer.status_code} {code}"] += 1
        if code == "job_not_found":
            raise Gone
        if code == "job_lost":
            self._ledger.lost_unheard(self._name)
        raise Broken(code)

    async def _again(self) -> None:
        """Waits a moment before the next try."""
        self._ledger.counts["retries"] += 1
        await asyncio.sleep(self._rng.uniform(0.05, 0.4))

    # --- streams ------------------------------------------------------------------------------

    async def _follow(
        self, story: Story, *, after: int = 0, hash_: str = "", token: str = ""
    ) -> bool:
        """Reads a job's events after the given one, by the token alone if there is one; True at
        their end. Raises Broken, Gone."""
        position = f"{after}.{hash_}" if hash_ else str(after)
        headers, params = {}, {"token": token} if token else {}
        if self._rng.random() < 0.5:
            headers["last-event-id"] = position
        else:
            params["starting_after"] = position
        path = f"/v1/jobs/{story.job_id}/events"
        return await self._stream(story, "GET", path, after=after, headers=headers, params=params)

    async def _stream(
        self, story: Story, method: str, path: str, *, after: int = 0, **options: Any
    ) -> bool:
        url = self._callers.url(self._rng) + path
        key = {} if "token" in options.get("params", {}) else self._headers
        options["headers"] = {**key, **options.get("headers", {})}
        try:
            async with self._callers.http.stream(method, url, **options) as response:
                if response.status_code >= 400:
                    await response.aread()
                    self.refuse(response)
                    return False  # 409: it was cancelled before
                story.accepted(response.headers["x-job-id"])
                story.connect(after)
                self._ledger.counts[f"{self.kind} streams that went on"] += after > 0
                return await self._receive_all(story, response)
        except httpx.HTTPError as exc:
            raise Broken(type(exc).__name__) from exc

    async def _receive_all(self, story: Story, response: httpx.Response) -> bool:
        """Whether the stream ended properly. An event that was cut off is not received."""
        parser = Parser()
        async for part in response.aiter_bytes():
            for sse in parser.feed(part):
                if sse.type == "reconnect":
                    self._ledger.counts["reconnects asked for"] += 1
                    return False
                self._receive(story, sse)
            if parser.is_done:
                return True
        return False

    def _receive(self, story: Story, sse: Sse) -> None:
        if sse.type == "stream_reset":
            story.reset()
        elif sse.is_end:
            story.ended(sse.type)
        elif sse.type == "message" and "error" in sse.data:
            self._receive_error(story, sse.data["error"]["code"])
        elif sse.type == "message":
            self._receive_chunk(story, sse.id or "", sse.data)

    def _receive_chunk(self, story: Story, id_: str, data: dict[str, Any]) -> None:
        output = {
            choice["index"]: tuple(choice["token_ids"])
            for choice in data["choices"]
            if choice.get("token_ids")
        }
        if not id_:
            if output and self.asks_for_ids:
                story.violate(Kind.WRONG, "tokens without an event's id")
            elif output:  # its own count of what has tokens
                story.receive(Event(len(story.events) + 1, "", output))
            return
        number, _, hash_ = id_.partition(".")
        story.receive(Event(int(number), hash_, output))

    def _receive_error(self, story: Story, code: str) -> None:
        self._ledger.counts[f"stream ended in {code}"] += 1
        if code in _PASSING:
            raise Broken(code)
        if code in _LOST:
            raise Gone
        if code == "stream_reset":
            story.reset()
            raise Broken(code)
        story.ended("cancelled" if code == "cancelled" else code)
