"""The memory of Redis, divided between lanes: the sums are exact and bound what Redis allocates."""

import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis.asyncio
from msgspec.structs import replace

from contract.callbacks import Callback, CallbackKind
from contract.connection import connect
from contract.errors import JobRefused
from contract.events import ChoiceDelta, Prompt, TokenLogprob, Tokens
from contract.function_types import Append, Claimed
from contract.functions import Functions
from contract.jobs import Job, JobStatus, SamplingParams
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import make_job, make_submission

pytestmark = pytest.mark.anyio

LANES = ("interactive", "standard", "batch", "scoring")
MIB = 2**20
SIZES = (
    pytest.param(8 * MIB, id="8 MiB"),
    pytest.param(14 * MIB, id="14 MiB"),
    pytest.param(64 * MIB, id="64 MiB", marks=pytest.mark.campaign),
)


class Crowd:
    """Tenants that submit jobs of every size to one server, and a worker."""

    def __init__(self, client: redis.asyncio.Redis, seed: int) -> None:
        self.client = client
        self.keys = Keys("memory")
        self.functions = Functions(client, self.keys)
        self.rng = random.Random(seed)
        self.held: list[Claimed] = []

    def job(self, tenant: str, lane: str) -> Job:
        """Short or long prompts, grammars, tools, kept responses, log probabilities."""
        rng = self.rng
        num_prompt = rng.choice([1, 30, 1_000, 12_000])
        params = SamplingParams(
            max_tokens=rng.choice([1, 20, 4096]),
            seed=1,
            grammar="x" * rng.choice([0, 0, 3_000, 60_000]),
            stop=tuple("s" * 60 for _ in range(rng.choice([0, 4]))),
            logprobs=rng.choice([None, None, 0, 5, 20]),
            prompt_logprobs=rng.choice([None, None, 0, 20]) if num_prompt <= 1_000 else None,
        )
        return replace(
            make_job(tenant, lane),
            prompt_ids=tuple(range(1000, 1000 + num_prompt)),
            params=params,
            return_token_ids=rng.random() < 0.5,
            tools={f"tool{n}": ("a", "b") for n in range(rng.choice([0, 0, 100]))},
            response=b"r" * rng.choice([0, 0, 10_000, 100_000]),
        )

    async def submit(self, job: Job) -> bool:
        """Whether the job was accepted. Raises BrokerFull."""
        rng = self.rng
        metadata = {f"m{n}": "v" * 500 for n in range(rng.choice([0, 0, 16]))}
        callback = Callback(kind=CallbackKind.URL, target="https://a/" + "x" * 500)
        submission = make_submission(
            max_output_tokens=job.params.max_tokens,
            retention_s=600.0,
            deadline_s=600.0,
            metadata=metadata,
            callback=rng.choice([None, None, callback]),
        )
        try:
            await self.functions.submit(job, submission)
        except JobRefused:
            return False
        return True

    async def claim(self, max_jobs: int = 1) -> list[Claimed]:
        terms = {"lease_s": 600, "max_jobs": max_jobs, "max_tokens": 10**9}
        return await self.functions.claim("w", "m", LANES, **terms)  # type: ignore[arg-type]

    async def append(self, claimed: Claimed, number: int, event: Any, num: int = 0) -> None:
        """An event, or the end in place of one."""
        fin = "" if event else JobStatus.SUCCEEDED
        item = Append(claimed.job.id, claimed.epoch, number, event, num, fin)  # type: ignore[arg-type]
        await self.functions.append("w", [item], lease_s=600)

    async def work(self) -> None:
        """Claims some jobs, gives some of them output, and ends some."""
        rng = self.rng
        self.held += await self.claim(rng.randrange(4))
        for claimed in list(self.held):
            if rng.random() < 0.5:
                await self.run(claimed)

    def scores(self, num_top: int | None, number: int) -> tuple[TokenLogprob, ...]:
        """Of so many tokens, as large as they get: any id, any score."""
        top = tuple((self.rng.randrange(2**17, 2**18), -1.5 - i / 7) for i in range(num_top or 0))
        return () if num_top is None else (TokenLogprob(2**18, -1 / 3, top),) * number

    async def run(self, claimed: Claimed) -> None:
        """To its end, with some of the output that it may have; some run on instead."""
        rng, params, number = self.rng, claimed.job.params, 1
        scored = self.scores(params.prompt_logprobs, claimed.job.num_prompt_tokens)
        for start in range(0, len(scored), 100):
            await self.append(claimed, number, Prompt(start + 1, scored[start : start + 100]))
            number += 1
        for start in range(rng.choice([0, 1, 40]) if params.max_tokens > 20 else 1):
            logprobs = self.scores(params.logprobs, 1) or None
            delta = ChoiceDelta(0, start, (2**17,), "word ", None, logprobs)
            await self.append(claimed, number, Tokens((delta,)), 1)
            number += 1
        if rng.random() >= 0.1:
            await self.append(claimed, number, None)
        self.held.remove(claimed)

    async def warm_up(self) -> None:
        """Redis allocates several hundred kilobytes at the first calls, once."""
        job = make_job("t", "batch")
        await self.submit(job)
        self.held = await self.claim()
        await self.run(self.held[0])
        await self.functions.cancel(job.id, "t")
        await self.functions.delete(job.id, "t")

    async def lanes(self) -> dict[str, int]:
        raw: Any = await self.client.hgetall(self.keys.of("stored", "lanes"))
        return {lane.decode(): int(held) for lane, held in raw.items()}

    async def check_sums(self) -> None:
        """The bytes of lanes, and of tenants in them, are those of the jobs."""
        noted: Any = await self.client.hgetall(self.keys.of("stored", "jobs"))
        lanes: dict[str, int] = {}
        lines: dict[str, int] = {}
        for row in noted.values():
            _, held, lane, tenant = row.decode().split()
            lanes[lane] = lanes.get(lane, 0) + int(held)
            lines[f"{lane} {tenant}"] = lines.get(f"{lane} {tenant}", 0) + int(held)
        raw: Any = await self.client.hgetall(self.keys.of("stored", "lines"))
        assert await self.lanes() == lanes
        assert {line.decode(): int(held) for line, held in raw.items()} == lines

    async def used(self) -> int:
        """What Redis has allocated, without what its clients are sending and reading."""
        memory: Any = await self.client.info("memory")
        passing = memory["mem_not_counted_for_evict"] + memory["mem_clients_normal"]
        return int(memory["used_memory"] - passing)


@pytest.fixture(params=SIZES)
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(max_memory_bytes=request.param) as server:
        yield server


@pytest.fixture
async def client(server: EmbeddedRedis) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(server.url, Keys("memory"), command_timeout_s=10.0)
    await ensure_library(client)
    yield client
    await client.aclose()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.each_value
async def test_the_sums_are_exact_and_bound_the_memory(
    client: redis.asyncio.Redis, seed: int
) -> None:
    """For mixes of jobs that wait, run, end, move and are deleted: what is counted is never less
    than what Redis took, and jobs never take more than four fifths of its memory."""
    crowd = Crowd(client, seed)
    most = (await client.info("memory"))["maxmemory"]
    await crowd.warm_up()
    before = await crowd.used()
    ids: list[tuple[str, str]] = []
    for step in range(250):
        tenant, lane = crowd.rng.choice("tuv"), crowd.rng.choice(LANES)
        job = crowd.job(tenant, lane)
        if await crowd.submit(job):
            ids.append((job.id, tenant))
        await crowd.work()
        if ids and crowd.rng.random() < 0.3:
            await crowd.functions.reprioritise(*crowd.rng.choice(ids), lane=crowd.rng.choice(LANES))
        if ids and crowd.rng.random() < 0.2:
            await crowd.functions.delete(*crowd.rng.choice(ids))
        if step % 25 == 0:
            await crowd.check_sums()
            assert await crowd.used() - before <= sum((await crowd.lanes()).values()) + 200_000
        assert await crowd.used() <= 0.8 * most + 200_000
    for job_id, tenant in ids:
        await crowd.functions.cancel(job_id, tenant)
        await crowd.functions.delete(job_id, tenant)
    assert await crowd.lanes() == {}
    assert await client.hgetall(crowd.keys.of("stored", "lines")) == {}


@pytest.mark.parametrize("prompt_logprobs", [None, 0, 20])
@pytest.mark.parametrize("logprobs", [None, 0, 1, 20])
@pytest.mark.parametrize("num_in_event", [1, 7])
@pytest.mark.each_pair
async def test_a_running_job_takes_no_more_than_is_counted(
    client: redis.asyncio.Redis,
    logprobs: int | None,
    prompt_logprobs: int | None,
    num_in_event: int,
) -> None:
    """Whatever its log holds for each token, and where it draws far more than is predicted: learned
    from outputs of one token."""
    crowd = Crowd(client, 1)
    for _ in range(6):
        short = make_job("t", "batch")
        await crowd.functions.submit(short, make_submission())
        [claimed] = await crowd.claim()
        await crowd.append(claimed, 1, Tokens(()), 1)
        await crowd.append(claimed, 2, None)
        await crowd.functions.delete(short.id, "t")
    params = SamplingParams(
        max_tokens=420, seed=1, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )
    job = replace(make_job("t", "batch", 300), params=params, return_token_ids=True)
    await crowd.functions.submit(job, make_submission(max_output_tokens=420))
    [claimed] = await crowd.claim()
    scored = crowd.scores(prompt_logprobs, job.num_prompt_tokens)
    events: list[tuple[Prompt | Tokens, int]] = [
        (Prompt(1 + start, scored[start : start + 50]), 0) for start in range(0, len(scored), 50)
    ]
    for start in range(0, 420, num_in_event):
        ids, text = (2**17,) * num_in_event, "worte " * num_in_event
        entries = crowd.scores(logprobs, num_in_event) or None
        delta = ChoiceDelta(0, start, ids, text, None, entries)
        events.append((Tokens((delta,)), num_in_event))
    for number, (event, num_tokens) in enumerate(events, 1):
        await crowd.append(claimed, number, event, num_tokens)
    used = 0
    for kind in ("job", "log"):
        used += await client.memory_usage(crowd.keys.of(kind, job.id), samples=0) or 0
    assert used <= (await crowd.lanes())["batch"]
    await crowd.check_sums()
