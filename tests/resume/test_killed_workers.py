"""Workers killed with kill -9, one after another, over a real Redis."""

import asyncio
from typing import Any

import pytest
import redis.asyncio

from contract.functions import Functions
from contract.jobs import Job, JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions, expected_output, output_text
from tests.fleet import Answer, Caller, WorkerProcess, fleet

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]

NUM_TOKENS = 70
MODEL = HashModelOptions(step_s=0.015, eos_rate=0.0, num_blocks=256)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampled": {"temperature": 1.0},
    "choices": {"temperature": 1.0, "n": 3},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1, "n": 3, "temperature": 1.0},
    "prompts": {"temperature": 1.0, "n": 2, "prompt_logprobs": 0, "varies_seed": True},
    "stop": {},  # a stop string from the middle of its output
    "never": {},  # one that begins again and again and never completes
}
STOP_AT = 35  # characters


def stops_of(kind: str, text: str) -> tuple[str, ...]:
    if kind == "stop":
        return (text[STOP_AT : STOP_AT + 4],)
    return tuple({character + "\0" for character in text[:40]})[:4] if kind == "never" else ()


def unstopped(job: Job, choice: int) -> list[int]:
    number, choice = divmod(choice, job.params.n)
    params = job.params.of_prompt(number)
    return expected_output(job.prompts[number], params, choice=choice, eos_rate=0.0)[0]


async def submit(caller: Caller, kind: str, number: int) -> Job:
    prompt = f"{kind} {number}"
    params = {"max_tokens": NUM_TOKENS, "seed": number, **KINDS[kind]}
    prompts = [prompt, "another", prompt] if kind == "prompts" else [prompt]
    plain = await caller.submit(*prompts, **params)
    stops = stops_of(kind, output_text(unstopped(plain, 0)))
    return await caller.submit(prompt, **params, stop=stops) if stops else plain


def assert_exact(job: Job, answer: Answer) -> None:
    """Every choice and the usage are as if its worker had not been killed."""
    assert answer.ends[0].status is JobStatus.SUCCEEDED
    for choice in range(job.num_choices):
        token_ids, whole = answer.token_ids[choice], unstopped(job, choice)
        assert token_ids == whole[: len(token_ids)]
        text = output_text(whole)
        stop = min((place for s in job.params.stop if (place := text.find(s)) >= 0), default=None)
        assert answer.text[choice] == text[:stop]
        assert answer.finish_reason[choice] == ("length" if stop is None else "stop")
        assert len(token_ids) == NUM_TOKENS or stop is not None
        if job.params.logprobs is not None:
            assert [one.token_id for one in answer.logprobs[choice]] == token_ids
    if job.params.prompt_logprobs is not None:
        for number, prompt_ids in enumerate(job.prompts):
            assert [one.token_id for one in answer.prompts[number]] == list(prompt_ids[1:])
    assert answer.ends[0].output_tokens == sum(map(len, answer.token_ids.values()))


async def busiest(caller: Caller, workers: list[WorkerProcess]) -> WorkerProcess:
    """The worker with most jobs, found by the process id in its incarnation."""
    held: dict[int, int] = {}
    prefix = caller.keys.of("own", "")
    keys: Any = await caller.client.keys(f"{prefix}*")
    for key in keys:
        held[pid_of(key.decode()[len(prefix) :])] = await caller.client.scard(key)
    return max(workers, key=lambda worker: held.get(worker.pid, 0))


async def second_holder(
    caller: Caller, jobs: list[Job], workers: list[WorkerProcess]
) -> WorkerProcess:
    """A worker with a job that another worker held before and that is far from its end."""
    async with asyncio.timeout(60):
        while True:
            for job in jobs:
                owner: Any = await caller.client.hget(caller.keys.of("job", job.id), "owner")
                view = await caller.view(job)
                holders = [w for w in workers if owner and w.pid == pid_of(owner.decode())]
                is_early = view.num_output_tokens < NUM_TOKENS * job.num_choices * 2 // 3
                if holders and view.attempt > 1 and is_early:
                    return holders[0]


def pid_of(incarnation: str) -> int:
    return int(incarnation.split("-")[-2])


async def test_jobs_survive_two_killed_workers_token_for_token(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis, keys: Keys
) -> None:
    """All kinds of jobs at once. The worker with most jobs is killed, then one that resumed one of
    them."""
    caller = Caller(Functions(redis_client, keys), redis_client, keys)
    settings = {"lease_s": 1.0, "engine": {"max_num_batched_tokens": 48}}
    async with fleet(redis_server.url, 3, MODEL, **settings) as workers:
        jobs = [await submit(caller, kind, number) for number in range(2) for kind in KINDS]
        for job in jobs:
            await caller.has_output(job, 8)
        first = await busiest(caller, workers)
        first.kill()
        workers.remove(first)
        second = await second_holder(caller, [job for job in jobs if not job.params.stop], workers)
        second.kill()
        workers.remove(second)
        for job in jobs:
            assert_exact(job, await caller.answer(job))
        attempts = [(await caller.view(job)).attempt for job in jobs]
    assert max(attempts) >= 3, "both kills must meet a running job"
