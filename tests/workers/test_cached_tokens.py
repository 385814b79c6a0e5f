"""A job tells what was cached of its prompts when they began, once, whatever becomes of it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.events import Tokens
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions
from tests.fleet import Caller, WorkerProcess, fleet
from tests.workers.held import hold, job_of
from workers.ipc.messages import TokenOut

SLOW = HashModelOptions(step_s=0.02, eos_rate=0.0)
BLOCK = SLOW.block_size


def finds(num_prompt: int) -> int:
    """What an equal prompt before it leaves to one of this length."""
    return (num_prompt - 1) // BLOCK * BLOCK


@given(
    sizes=st.lists(st.integers(2, 9), min_size=1, max_size=3),
    n=st.integers(1, 2),
    found=st.lists(st.integers(0, 12), min_size=40, max_size=40),
    acts=st.lists(st.sampled_from([*range(6), "log", "log", "die"]), min_size=8, max_size=40),
)
def test_each_prompt_is_told_once_with_its_first_output(
    sizes: list[int], n: int, found: list[int], acts: list[int | str]
) -> None:
    """A number is a token of a choice, whose prompt may begin with it. As the run that logged it
    found it, at most all but its last token; what one run has logged, no later run changes."""
    job = job_of(*(tuple(range(size)) for size in sizes), params={"n": n, "max_tokens": 50})
    log, held = list[Tokens](), hold(job)
    begun, told = dict[int, int](), set[int]()  # prompts: of this run, of the log
    produced = Counter[int]()  # by choice
    for act in acts:
        if isinstance(act, int):
            choice = act % job.num_choices
            if choice // n not in begun:
                begun[choice // n] = found.pop()
                held.note_prefix(choice, begun[choice // n])
            held.take(TokenOut(job.id, 1, choice, produced[choice], 97))
            produced[choice] += 1
        elif act == "die":
            held, begun = hold(job, *log), {}
            deltas = (delta for event in log for delta in event.deltas)
            produced = Counter(delta.choice for delta in deltas for _ in delta.token_ids)
        elif isinstance(event := held.take_event()[0], Tokens):
            new = {delta.choice // n for delta in event.deltas} - told
            assert event.num_cached == sum(min(begun[p], sizes[p] - 1) for p in new)
            log.append(event)
            told |= new


@pytest.mark.anyio
@pytest.mark.e2e
async def test_the_record_and_the_end_have_what_each_prompt_found(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """The engine's whole blocks, before the last token; each prompt once, however many choices."""
    async with fleet(redis_server.url, 1):
        for text in ("a" * 16, "b" * 17, "c" * 33, "d" * 50):
            for found in (0, finds(len(text))):
                job = await caller.submit(text, n=1 + len(text) % 3, max_tokens=4)
                [end] = (await caller.answer(job)).ends
                view = await caller.view(job)
                assert end.cached_tokens == view.num_cached_tokens == found
        job = await caller.submit("c" * 33, "e" * 33, "d" * 50, "b" * 17, n=2, max_tokens=4)
        [end] = (await caller.answer(job)).ends
        assert end.cached_tokens == finds(33) + finds(50) + finds(17)
        logged = [e.event for e in await caller.entries(job) if isinstance(e.event, Tokens)]
        assert sum(event.num_cached for event in logged) == end.cached_tokens


@pytest.mark.anyio
@pytest.mark.e2e
@pytest.mark.parametrize("is_cached", [True, False])
async def test_a_worker_s_death_does_not_change_it(
    caller: Caller, redis_server: EmbeddedRedis, is_cached: bool
) -> None:
    """Neither where the next worker has less in its cache, nor where it has more."""
    text = "a prompt of more than two blocks of tokens"
    async with fleet(redis_server.url, 1, SLOW, lease_s=1.0) as workers:
        if is_cached:
            await caller.answer(await caller.submit(text, max_tokens=1))
        job = await caller.submit(text, max_tokens=60)
        await caller.has_output(job, 4)
        workers[-1].kill()
        workers.append(WorkerProcess(redis_server.url, SLOW, lease_s=1.0))
        if not is_cached:
            await caller.answer(await caller.submit(text, max_tokens=1))
        [end] = (await caller.answer(job)).ends
        view = await caller.view(job)
    assert view.attempt == 2
    assert end.cached_tokens == view.num_cached_tokens == (finds(len(text)) if is_cached else 0)
