"""Jobs and calls with default arguments, for the tests of the Redis functions."""

from typing import Any

import redis.asyncio

from contract.callbacks import Callback, CallbackKind
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Claimed, Submission, Verdict
from contract.functions import Functions
from contract.jobs import Endpoint, Job, JobStatus, SamplingParams
from contract.keys import Keys, new_job_id
from contract.outbox import Outbox
from tests.clock import clock_key
from tests.cluster import partition_of_test

LEASE_S = 10.0


def make_job(
    tenant: str = "t", lane: str = "standard", num_prompt: int = 3, weight: float = 1.0
) -> Job:
    return Job(
        id=new_job_id(partition_of_test()),
        tenant=tenant,
        model="m",
        lane=lane,
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=tuple(range(num_prompt)),
        params=SamplingParams(max_tokens=10, seed=1),
        created_s=0,
        weight=weight,
    )


def make_submission(**overrides: object) -> Submission:
    fields: dict[str, object] = {
        "max_output_tokens": 10,
        "deadline_s": 60.0,
        "retention_s": 60.0,
    }
    return Submission(**(fields | overrides))  # type: ignore[arg-type]


def tokens(start: int, *ids: int) -> Tokens:
    return Tokens((ChoiceDelta(0, start, ids, "x" * len(ids)),))


async def claim(
    functions: Functions,
    incarnation: str = "w1",
    max_jobs: int = 8,
    max_tokens: int = 1000,
    *,
    is_idle: bool = False,
) -> list[Claimed]:
    return await functions.claim(
        incarnation,
        "m",
        ["interactive", "standard"],
        lease_s=LEASE_S,
        max_jobs=max_jobs,
        max_tokens=max_tokens,
        is_idle=is_idle,
    )


async def append(
    functions: Functions, incarnation: str, *items: Append
) -> list[tuple[Verdict | JobStatus, int]]:
    return await functions.append(incarnation, items, lease_s=LEASE_S)


async def dead_letter(functions: Functions, outbox: Outbox, **names: Any) -> str:
    """The id of a job whose callback was given up."""
    callback = Callback(kind=CallbackKind.URL, target="https://a.example/x?token=hush")
    terms = {"deadline_s": 900, "retention_s": 900, "callback": callback}
    terms |= {"metadata": names.pop("metadata")} if "metadata" in names else {}
    job = make_job(**names)
    await functions.submit(job, make_submission(**terms))
    await functions.cancel(job.id, job.tenant)
    [taken] = await outbox.take(lease_s=10, max_messages=1, max_per_target=9)
    await outbox.done(taken, "dead", note="HTTP 410")
    return job.id


async def pass_time(client: redis.asyncio.Redis, keys: Keys, seconds: float) -> None:
    await client.incrby(clock_key(), int(seconds * 1000))
