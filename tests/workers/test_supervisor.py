"""Real workers on the hash model over a real Redis: every token is known beforehand."""

import asyncio
import os
import subprocess

import pytest

from contract.catalogue import Catalogue
from contract.connection import connect
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Release
from contract.functions import Functions
from contract.jobs import Job, JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions, expected_output, output_text
from tests.fleet import Answer, Caller, fleet, until

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

SLOW = HashModelOptions(step_s=0.02, eos_rate=0.0)


def assert_exact(job: Job, answer: Answer, model: HashModelOptions | None = None) -> None:
    """Each choice is the undisturbed hash model's output for its prompt alone."""
    options = model or HashModelOptions()
    assert answer.token_ids.keys() == set(range(job.num_choices))
    for choice in range(job.num_choices):
        number = choice // job.params.n
        expected, reason = expected_output(
            job.prompts[number],
            job.params.of_prompt(number),
            choice=choice % job.params.n,
            max_model_len=options.max_model_len,
            eos_rate=options.eos_rate,
        )
        assert answer.token_ids[choice] == expected
        assert answer.finish_reason[choice] == reason
        shown = expected[:-1] if reason == "stop" else expected
        assert answer.text[choice] == output_text(shown)
    [end] = answer.ends
    assert end.status is JobStatus.SUCCEEDED
    assert end.prompt_tokens == sum(map(len, job.prompts))
    assert end.output_tokens == sum(map(len, answer.token_ids.values()))


async def test_concurrent_jobs_have_the_output_of_each_alone(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """Forty jobs with several choices and sampling parameters, one worker: exact tokens, text and
    usage."""
    async with fleet(redis_server.url, 1):
        jobs = [
            await caller.submit(
                f"prompt {i} " * (1 + i % 4),
                *[f"another {i}"] * (i % 5),
                n=1 + i % 3,
                varies_seed=i % 2 > 0,
                temperature=float(i % 2),
                seed=i,
                min_tokens=i % 5,
            )
            for i in range(40)
        ]
        for job in jobs:
            assert_exact(job, await caller.answer(job))


async def test_a_job_tells_of_the_chunks_of_its_prompt(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """Where they were computed, after the claim and before the first token."""
    async with fleet(redis_server.url, 1, SLOW, engine={"max_num_batched_tokens": 16}):
        job = await caller.submit("a prompt of forty tokens, more or less...", max_tokens=4)
        assert_exact(job, await caller.answer(job), SLOW)
        view = await caller.view(job)
        [run] = view.runs
        [mark] = run.marks
        assert (mark.kind, mark.num_tokens) == ("prefill", view.num_prompt_tokens)
        assert mark.num == -(-view.num_prompt_tokens // 16) > 1
        assert view.first_token_ms is not None
        assert run.claimed_ms <= mark.begun_ms < mark.ended_ms <= view.first_token_ms


async def test_a_worker_makes_its_model_known(caller: Caller, redis_server: EmbeddedRedis) -> None:
    """Card and tokenizer are in Redis once it is ready; it is removed from the list at its end."""
    catalogue = Catalogue(caller.client, caller.keys)
    async with fleet(redis_server.url, 1):
        await caller.num_workers(1)
        [card] = await catalogue.models()
        assert (card.name, card.vocab_size) == ("m", 259)
        assert (await catalogue.tokenizer(card.tokenizer_sha256)).chat_template
        assert await catalogue.num_live_workers("m") == 1
    assert await catalogue.num_live_workers("m") == 0


async def test_a_killed_supervisor_leaves_no_engine_behind(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """The engine process ends with its socket."""
    async with fleet(redis_server.url, 1) as [worker]:
        await caller.num_workers(1)
        [engine_pid] = children_of(worker.pid)
        worker.kill()

        async def gone() -> bool:
            return not is_alive(engine_pid)

        await until(gone)


async def test_a_stop_string_ends_a_choice_and_is_not_shown(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """The supervisor finds it and stops the choice in the engine, which knows no text. The other
    choice goes on."""
    plain = await caller.submit("find a stop", max_tokens=60)
    async with fleet(redis_server.url, 1, SLOW):
        text = (await caller.answer(plain)).text[0]
        stop = text[20:23]
        job = await caller.submit("find a stop", "another", max_tokens=60, stop=(stop,))
        answer = await caller.answer(job)
    assert answer.text[0] == text[: text.index(stop)]
    assert answer.finish_reason == {0: "stop", 1: "length"}
    assert len(answer.token_ids[1]) == 60


async def test_logprobs_travel_beside_their_tokens(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """One entry per token, with as many alternatives as requested; none for another job."""
    async with fleet(redis_server.url, 1):
        asks = await caller.submit("lp", logprobs=2, max_tokens=5)
        asks_not = await caller.submit("lp", max_tokens=5)
        answer = await caller.answer(asks)
        assert (await caller.answer(asks_not)).logprobs == {0: []}
    assert [lp.token_id for lp in answer.logprobs[0]] == answer.token_ids[0]
    assert all(len(lp.top) == 2 for lp in answer.logprobs[0])


async def test_a_job_that_cannot_run_fails_alone(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """Too long for the model, also in an idle engine, or a row that cannot be computed: one error
    for one job."""
    model = HashModelOptions(bad_row_id=1)  # a byte that never occurs in its output
    async with fleet(redis_server.url, 1, model):
        too_long = await caller.submit("x" * 600)
        assert (await caller.answer(too_long)).ends[0].code == "prompt_too_long"
        good = await caller.submit("fine", max_tokens=30)
        bad_row = await caller.submit("\1")
        assert (await caller.answer(bad_row)).ends[0].code == "engine_error"
        assert_exact(good, await caller.answer(good))


async def test_a_log_that_cannot_be_read_fails_its_job_alone(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """Its log has a gap, which no worker leaves: the worker continues with the next job."""
    broken = await caller.submit("broken")
    [claimed] = await caller.functions.claim(
        "another", "m", ("standard",), lease_s=60, max_jobs=1, max_tokens=1000
    )
    event = Tokens((ChoiceDelta(0, 5, (65,), "A"),))
    await caller.functions.append("another", [Append(broken.id, 1, 1, event, 1)], lease_s=60)
    await caller.functions.release("another", [Release(broken.id, claimed.epoch, "drain")])
    good = await caller.submit("good")
    async with fleet(redis_server.url, 1):
        assert_exact(good, await caller.answer(good))

        async def has_failed() -> bool:
            return (await caller.view(broken)).status is JobStatus.FAILED

        await until(has_failed)
    assert (await caller.view(broken)).code == "engine_error"


async def test_a_refused_model_ends_the_worker_with_one_sentence(
    redis_server: EmbeddedRedis, functions: Functions
) -> None:
    """Exit status 3, no endless restarts."""
    async with fleet(redis_server.url, 1, HashModelOptions(refuses="no such model")) as [worker]:
        assert await asyncio.to_thread(worker.wait, 20) == 3


async def test_a_worker_ends_on_a_redis_that_evicts_keys(keys: Keys) -> None:
    """It could lose jobs silently: exit status 3, although the model is loaded."""
    with EmbeddedRedis() as server:
        client = connect(server.url, Keys("test"))
        await client.config_set("maxmemory-policy", "allkeys-lru")
        await client.aclose()
        async with fleet(server.url, 1) as [worker]:
            assert await asyncio.to_thread(worker.wait, 30) == 3


async def test_a_job_that_hangs_engines_fails_alone(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """The engine does not exit by itself: the supervisor ends it because its step does not end."""
    model = HashModelOptions(hang_id=0, step_s=0.005)  # a byte that never occurs in its output
    async with fleet(redis_server.url, 1, model, step_timeout_s=1.5, max_crashes=2):
        before = [await caller.submit(f"before {i}", max_tokens=20) for i in range(3)]
        hanging = await caller.submit("\0", max_tokens=20)
        after = [await caller.submit(f"after {i}", max_tokens=20) for i in range(3)]
        [end] = (await caller.answer(hanging, timeout_s=120)).ends
        assert (end.status, end.code) == (JobStatus.FAILED, "poison")
        for job in (*before, *after):
            assert_exact(job, await caller.answer(job))


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children."""
    rows = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout
    pairs = (map(int, row.split()) for row in rows.splitlines())
    return [child for child, parent in pairs if parent == pid]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
