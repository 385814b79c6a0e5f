"""Clients that do not give up: they stream and resume at any gateway, ask again for a message,
submit and repeat, follow by a token, cancel, and disconnect."""

import asyncio
import hashlib
import time
from collections.abc import Mapping
from typing import Any

from batchway_client.events import Event as Sse
from batchway_client.jobs import TERMINAL
from tests.callbacks.receiver import SECRET
from tests.chaos.callers import Broken, Client, Gone
from tests.chaos.ledger import Event, Kind, Story
from tests.chaos.oracles import Ask, HashOracle
from tests.fakes import EOS_ID, encode_text


class Streamer(Client):
    """Reads an answer as a stream. After a failure it resumes after the last event, or repeats its
    call with the same key. At the end it reads the events once more, from any position."""

    kind = "streamer"

    async def live(self, story: Story, ask: Ask) -> None:
        is_done = False
        while not is_done:
            try:
                is_done = await self._once(story, ask)
            except Broken as exc:
                self._ledger.counts[f"broken by {exc}"] += 1
            except Gone:
                story.vanished()
            if not is_done:
                await self._again()
        if story.status is None:
            story.ended("succeeded")  # a call's stream ends without another word
        if story.status == "succeeded":
            story.answered(story.output)

    async def _once(self, story: Story, ask: Ask) -> bool:
        if story.job_id is None or self._rng.random() < 0.15:
            return await self._stream(
                story,
                "POST",
                ask.endpoint,
                json={**ask.body, "stream": True},
                headers={"idempotency-key": story.name},
            )
        self._ledger.counts["resumes"] += 1
        return await self._follow(story, **_last(story))


def _last(story: Story) -> dict[str, Any]:
    """The last event that the client has, after which it goes on."""
    if not story.events:
        return {}
    last = story.events[max(story.events)]
    return {"after": last.number, "hash_": last.hash}


class Messenger(Streamer):
    """Asks for messages in Anthropic's form, two of three as streams. Its protocol resumes
    nothing: after a failure the call is made again with the same key, which reads the answer from
    its start, or from the last event, as clients of this server may."""

    kind = "messenger"

    def draw(self) -> Ask:
        assert isinstance(self._callers.oracle, HashOracle)
        return self._callers.oracle.draw_message(self._rng)

    async def _once(self, story: Story, ask: Ask) -> bool:
        headers = {"idempotency-key": story.name}
        if self._num_stories % 3 == 0:
            answer = await self._request("POST", ask.endpoint, json=ask.body, headers=headers)
            message = answer.json()
            story.accepted(answer.headers["x-job-id"])
            for number, block in enumerate(message["content"], 1):
                story.receive(Event(number, "", {0: encode_text(block["text"])}))
            self._end(story, message["stop_reason"], message["usage"])
            return True
        after = 0
        if story.events and self._rng.random() < 0.75:
            last = story.events[max(story.events)]
            after, headers["last-event-id"] = last.number, f"{last.number}.{last.hash}"
        body = {**ask.body, "stream": True}
        await self._stream(story, "POST", ask.endpoint, after=after, json=body, headers=headers)
        return story.status is not None

    def _receive(self, story: Story, sse: Sse) -> None:
        match sse.type:
            case "stream_reset":
                story.reset()
            case "error":
                self._receive_error(story, sse.data["error"]["code"])
            case "content_block_delta":
                number, _, hash_ = (sse.id or "").partition(".")
                token_ids = encode_text(sse.data["delta"]["text"])
                story.receive(Event(int(number), hash_, {0: token_ids}))
            case "message_delta":
                self._end(story, sse.data["delta"]["stop_reason"], sse.data["usage"])

    def _end(self, story: Story, stop_reason: str, usage: Mapping[str, int]) -> None:
        """The message is whole: its text does not show the token that ended it."""
        if stop_reason == "end_turn":
            story.receive(Event(max(story.events, default=0) + 1, "", {0: (EOS_ID,)}))
        if usage["output_tokens"] != len(story.expected[0]):
            story.violate(Kind.WRONG, f"a message with {usage}")
        story.ended("succeeded")


class Submitter(Client):
    """Submits a job, sometimes at two gateways at once with one key, and reads its result. Half of
    the jobs have a callback, a third a start that is to come."""

    kind = "submitter"

    async def live(self, story: Story, ask: Ask) -> None:
        await self._submit(story, ask)
        job = await self._until_terminal(story, ask)
        story.ended(job["status"])
        if job["status"] == "succeeded":
            story.answered({c["index"]: c["token_ids"] for c in job["result"]["choices"]})
        await self._replay(story)

    async def _submit(self, story: Story, ask: Ask) -> None:
        """Repeats the call until a gateway has accepted it. One key has one job, however often it
        is sent."""
        body = self._body(story, ask)
        while story.job_id is None:
            times = self._rng.choice((1, 1, 2))
            posts = (self._post(body, story.name) for _ in range(times))
            for answer in await asyncio.gather(*posts, return_exceptions=True):
                if isinstance(answer, str):
                    story.accepted(answer)
                elif not isinstance(answer, Broken):
                    raise answer
            if story.job_id is None:
                await self._again()

    def _body(self, story: Story, ask: Ask) -> dict[str, Any]:
        """The same for the whole story: one key has one body."""
        body: dict[str, Any] = {"endpoint": ask.endpoint, "body": ask.body}
        urls = self._callers.receiver_urls
        number = int(hashlib.sha256(story.name.encode()).hexdigest(), 16)
        story.has_callback = number % 2 == 0
        if story.has_callback:
            body["callback"] = {"url": urls[number // 2 % len(urls)], "secret": SECRET}
        if number % 3 == 0:
            story.start_at = story.start_at or time.time() + number % 4
            body["start_at"] = story.start_at
        return body

    async def _post(self, body: Mapping[str, Any], key: str) -> str:
        answer = await self._request(
            "POST", "/v1/jobs", json=body, headers={"idempotency-key": key}
        )
        return str(answer.json()["id"])

    async def _until_terminal(self, story: Story, ask: Ask) -> dict[str, Any]:
        while True:
            try:
                answer = await self._request("GET", f"/v1/jobs/{story.job_id}")
                job: dict[str, Any] = answer.json()
                if job["status"] in TERMINAL:
                    return job
                await asyncio.sleep(self._rng.uniform(0.1, 0.5))
            except Broken:
                await self._again()
            except Gone:
                story.vanished()
                await self._submit(story, ask)

    async def _replay(self, story: Story) -> None:
        """Reads the finished log from its start, and once more from the middle."""
        status, story.status = story.status, None
        for start in (0, self._rng.randint(0, 8)):
            while True:
                story.status = None
                after = 0 if story.may_have_lost else min(start, len(story.events))
                try:
                    if await self._follow(story, after=after):
                        break
                except Broken:
                    pass
                except Gone:
                    story.vanished()
                    return
                await self._again()
        if story.status != status and not story.may_have_lost:
            story.violate(Kind.DOUBLE_TERMINAL, f"{status}, and later {story.status}")


class Browser(Submitter):
    """Its backend submits a job and makes a token for it. The page follows by that token alone, at
    another gateway after each failure, from its last event on as `EventSource` does."""

    kind = "browser"

    async def live(self, story: Story, ask: Ask) -> None:
        token = ""
        while story.status is None:
            try:
                if story.job_id is None:
                    await self._submit(story, ask)
                    token = ""
                token = token or await self._token(story)
                await self._follow(story, token=token, **_last(story))
            except Broken as exc:
                self._ledger.counts[f"broken by {exc}"] += 1
            except Gone:
                story.vanished()
            if story.status is None:
                await self._again()
        story.answered(story.output)

    async def _token(self, story: Story) -> str:
        answer = await self._request("POST", f"/v1/jobs/{story.job_id}/token")
        return str(answer.json()["value"])


class Canceller(Submitter):
    """Cancels its job after a while. Earlier output must be a prefix of the expected output."""

    kind = "canceller"
    may_cancel = True

    async def live(self, story: Story, ask: Ask) -> None:
        await self._submit(story, ask)
        await asyncio.sleep(self._rng.expovariate(1.5))
        while story.status is None:
            try:
                answer = await self._request("POST", f"/v1/jobs/{story.job_id}/cancel")
            except Broken:
                await self._again()
                continue
            except Gone:
                story.vanished()
                return
            if answer.status_code == 409:
                story.ended("succeeded")
            else:
                story.ended("cancelled")
                usage = answer.json()["usage"]
                story.num_tokens_at_cancel = usage["completion_tokens"] if usage else 0
        await self._replay(story)


class Leaver(Client):
    """Streams without a key and closes the connection: its job must still end."""

    kind = "leaver"
    may_cancel = True
    asks_for_ids = False

    async def live(self, story: Story, ask: Ask) -> None:
        body = {**ask.body, "stream": True}
        try:
            async with asyncio.timeout(self._rng.uniform(0.1, 4.0)):
                await self._stream(story, "POST", ask.endpoint, json=body)
        except (Broken, Gone, TimeoutError):
            pass
        if story.job_id is None:
            self._ledger.counts["calls without a reply"] += 1
            await self._again()
