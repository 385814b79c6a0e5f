"""Concurrent callers of all kinds: they stream, wait, submit, cancel, disconnect and send bad
requests."""

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.endurance.side_by_side import side_by_side
from tests.infra.stack import MODEL

BAD_ROW_ID = 1  # a byte only in prompts that are to fail; see HashModelOptions
NUM_CALLERS = 12
# Few: `tokenizers` keeps the last 10,000 texts, 16 MiB of texts such as ours, which is no leak.
NUM_TEXTS = 50
Call = Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]


@dataclass
class Load:
    """`counts` holds the number of calls of each kind; `surprises` the unexpected responses."""

    url: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def run(self, duration_s: float) -> None:
        """Returns once all callers have ended and closed their connections."""
        is_over = asyncio.Event()

        async def set_when_over() -> None:
            await asyncio.sleep(duration_s)
            is_over.set()

        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            callers = [self._call_on(http, is_over) for _ in range(NUM_CALLERS)]
            await side_by_side(set_when_over(), *callers)

    async def _call_on(self, http: httpx.AsyncClient, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            rng = random.Random(f"{self.seed} {next(self._numbers)}")
            name = rng.choice(list(CALLS))
            try:
                await CALLS[name](http, rng)
            except (AssertionError, httpx.HTTPError) as exc:
                self.surprises.append(f"{name}: {type(exc).__name__} {exc}"[:200])
            self.counts[name] += 1


def _body(rng: random.Random, **changes: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": [rng.randrange(32, 127) for _ in range(rng.choice((3, 30, 200)))],
        "max_tokens": rng.randrange(2, 40),
        "n": rng.choice((1, 1, 2)),
        **changes,
    }


async def _submit(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    submission = {"endpoint": "/v1/completions", "body": body}
    answer = await http.post("/v1/jobs", json=submission)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def _stream(http: httpx.AsyncClient, rng: random.Random) -> None:
    body = _body(rng, stream=True)
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"


async def _chat(http: httpx.AsyncClient, rng: random.Random) -> None:
    messages = [{"role": "user", "content": f"hello {rng.randrange(NUM_TEXTS)}"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": rng.randrange(2, 40)}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


async def _job(http: httpx.AsyncClient, rng: random.Random) -> None:
    """A job that is followed by two readers: one reads everything, the other leaves."""
    job_id = await _submit(http, _body(rng))
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as events:
        await anext(events.aiter_lines())
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as events:
        if events.status_code == 404:
            return  # forgotten meanwhile: a soak keeps nothing for long
        names = [line async for line in events.aiter_lines() if line.startswith("event: ")]
    assert names[-1:] == ["event: succeeded"]
    answer = await http.get(f"/v1/jobs/{job_id}")
    assert answer.status_code == 404 or answer.json()["status"] == "succeeded", answer.text


async def _cancelled_job(http: httpx.AsyncClient, rng: random.Random) -> None:
    job_id = await _submit(http, _body(rng, max_tokens=100))
    await asyncio.sleep(rng.random() / 2)
    answer = await http.post(f"/v1/jobs/{job_id}/cancel")
    assert answer.status_code in (200, 409), answer.text


async def _closed_stream(http: httpx.AsyncClient, rng: random.Random) -> None:
    body = _body(rng, stream=True, max_tokens=100)
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        await anext(answer.aiter_lines())


async def _closed_call(http: httpx.AsyncClient, rng: random.Random) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(rng.random() / 2):
            await http.post("/v1/completions", json=_body(rng, max_tokens=100))


async def _failing_job(http: httpx.AsyncClient, rng: random.Random) -> None:
    """A job that fails in the engine at each attempt."""
    body = {"model": MODEL, "prompt": [BAD_ROW_ID] * rng.randrange(1, 50)}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 500, answer.text


async def _refused_call(http: httpx.AsyncClient, rng: random.Random) -> None:
    path, changes, status = rng.choice(
        (
            ("/v1/completions", {"model": "nobody"}, 404),
            ("/v1/completions", {"max_tokens": -1}, 400),
            ("/v1/completions", {"prompt": "x" * 5000}, 400),
            ("/v1/chat/completions", {}, 400),
            ("/v1/nothing", {}, 404),
        )
    )
    answer = await http.post(path, json=_body(rng, **changes))
    assert answer.status_code == status, answer.text


CALLS: dict[str, Call] = {
    "stream": _stream,
    "chat": _chat,
    "job": _job,
    "cancelled job": _cancelled_job,
    "closed stream": _closed_stream,
    "closed call": _closed_call,
    "failing job": _failing_job,
    "refused call": _refused_call,
}
