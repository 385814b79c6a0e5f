"""A batch in a campaign: it runs once undisturbed, then again while faults strike. Both times each
line must be answered once, and equally."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from contract.batches import line_job_id
from contract.jobs import Job
from tests.chaos.callers import Broken, Client
from tests.chaos.ledger import Kind, Output, Story
from tests.chaos.oracles import CHAT, Ask, Oracle

KILLS = ("worker kill -9", "engine kill -9", "gateway kill -9", "redis kill -9")
_BAD_EVERY = 50  # of the lines one cannot run, and is answered in the error file
_ENDED = ("completed", "failed", "expired", "cancelled")
_FILE_KINDS = ("output_file_id", "error_file_id")
_POLL_S = 0.5

Lines = Mapping[str, Any]  # a line's result by its custom id


class BatchOracle:
    """One file. `asks` are its good lines by custom id, `undisturbed` the results of all lines."""

    def __init__(self, inner: Oracle, rng: random.Random, num_lines: int) -> None:
        self.inner = inner
        self.model, self.is_exact = inner.model, inner.is_exact
        self.num_lines = num_lines
        self.asks: dict[str, Ask] = {}
        self.undisturbed: Lines = {}
        self.line_job_ids: set[str] = set()  # of all batches
        lines = [self._line(rng, number) for number in range(num_lines)]
        self.content = "".join(json.dumps(line) + "\n" for line in lines).encode()

    def draw(self, rng: random.Random) -> Ask:
        """The whole file: a story has no tokens of its own."""
        return Ask(CHAT, {}, ())

    def is_right(self, asked: Job | None, output: Output, *, is_whole: bool) -> bool:
        return self.inner.is_right(asked, output, is_whole=is_whole)

    def _line(self, rng: random.Random, number: int) -> dict[str, Any]:
        custom_id = f"line-{number}"
        ask = self.inner.draw(rng)
        while ask.endpoint != CHAT:
            ask = self.inner.draw(rng)
        body = dict(ask.body)
        if number % _BAD_EVERY == 1:
            body["temperature"] = 9
        else:
            self.asks[custom_id] = ask
        return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}

    def check(self, story: Story, results: Sequence[Mapping[str, Any]]) -> Lines:
        """Compares the results with the model's tokens and the undisturbed run."""
        num_results = Counter(each["custom_id"] for each in results)
        for number in range(self.num_lines):
            times = num_results.pop(f"line-{number}", 0)
            if times != 1:
                kind = Kind.DUPLICATED if times else Kind.LOST
                story.violate(kind, f"line {number} has {times} results")
        if num_results:
            story.violate(Kind.WRONG, f"{len(num_results)} results of no line")
        found = {each["custom_id"]: _lasting(each) for each in results}
        for custom_id in found.keys() & self.undisturbed.keys():
            ask = self.asks.get(custom_id)
            if found[custom_id] == self.undisturbed[custom_id]:
                continue
            if ask and self.is_right(ask.asked, _tokens(found[custom_id]), is_whole=True):
                story.ledger.num_near_ties += 1
            else:
                story.violate(Kind.WRONG, f"{custom_id} is another than undisturbed")
        return found

    def expect(self, story: Story, results: Sequence[Mapping[str, Any]]) -> None:
        """Takes the results of the undisturbed run, whose tokens are those of the model."""
        self.undisturbed = self.check(story, results)
        for custom_id, ask in self.asks.items():
            output = _tokens(self.undisturbed.get(custom_id))
            if output != dict(enumerate(ask.expected)) and not self.is_right(
                ask.asked, output, is_whole=True
            ):
                story.violate(Kind.WRONG, f"{custom_id} is wrong before any fault")


def _tokens(result: Any) -> dict[int, tuple[int, ...]]:
    body = ((result or {}).get("response") or {}).get("body", {})
    return {choice["index"]: tuple(choice["token_ids"]) for choice in body.get("choices", ())}


def _lasting(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result without what differs between two runs: ids, the time, what caches had."""
    response = result["response"]
    body = {k: v for k, v in response["body"].items() if k not in ("id", "created")}
    if "usage" in body:
        body["usage"] = {k: v for k, v in body["usage"].items() if k != "prompt_tokens_details"}
    return {
        "error": result["error"],
        "response": {"status_code": response["status_code"], "body": body},
    }


class Batcher(Client):
    """Runs the file as a batch, until faults are over."""

    kind = "batcher"
    patience_s = 1_800.0

    async def prepare(self) -> None:
        """The undisturbed run."""
        oracle = self._oracle
        story = self._ledger.open(f"{self._name} undisturbed", ())
        oracle.expect(story, await self._results(story))

    async def live(self, story: Story, ask: Ask) -> None:
        found = self._oracle.check(story, await self._results(story))
        for result in found.values():
            self._ledger.num_tokens += sum(map(len, _tokens(result).values()))
        self._ledger.counts["lines of batches"] += self._oracle.num_lines

    @property
    def _oracle(self) -> BatchOracle:
        assert isinstance(self._callers.oracle, BatchOracle)
        return self._callers.oracle

    async def _results(self, story: Story) -> list[Mapping[str, Any]]:
        files = {"file": ("in.jsonl", self._oracle.content), "purpose": (None, "batch")}
        file_id = (await self._surely("POST", "/v1/files", files=files)).json()["id"]
        batch = await self._created(file_id)
        self._oracle.line_job_ids |= {
            line_job_id(batch["id"], number) for number in range(1, self._oracle.num_lines + 1)
        }
        while batch["status"] not in _ENDED:
            await asyncio.sleep(_POLL_S)
            batch = (await self._surely("GET", f"/v1/batches/{batch['id']}")).json()
            story.touch()
        counts, num_bad = batch["request_counts"], self._oracle.num_lines - len(self._oracle.asks)
        if (batch["status"], counts["failed"]) != ("completed", num_bad):
            story.violate(Kind.LOST, f"the batch is {batch['status']} with {counts}")
        ids = [batch[kind] for kind in _FILE_KINDS if batch[kind]]
        texts = [(await self._surely("GET", f"/v1/files/{each}/content")).text for each in ids]
        return [json.loads(line) for text in texts for line in text.splitlines()]

    async def _created(self, file_id: str) -> Any:
        """The batch of a file. A call whose answer was lost may have made it."""
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        while True:
            listed = (await self._surely("GET", "/v1/batches")).json()["data"]
            for batch in listed:
                if batch["input_file_id"] == file_id:
                    return batch
            try:
                return (await self._request("POST", "/v1/batches", json=body)).json()
            except Broken:
                await self._again()

    async def _surely(self, method: str, path: str, **options: Any) -> httpx.Response:
        while True:
            try:
                return await self._request(method, path, **options)
            except Broken as exc:
                self._ledger.counts[f"broken by {exc}"] += 1
                await self._again()
