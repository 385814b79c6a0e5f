"""Log probabilities of prompts in the log: complete, in order, each position once."""

from typing import Any

import pytest
import redis.asyncio
from tokenizers import Tokenizer

from contract.events import LogEntry, Prompt, TokenLogprob, Tokens
from contract.function_types import Claimed
from contract.functions import Functions
from contract.jobs import Endpoint, Job, SamplingParams
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import (
    HashModelOptions,
    expected_output,
    expected_prompt_logprobs,
    hash_tokenizer,
)
from tests.fleet import Answer, Caller, fleet, until
from workers.ipc.messages import PromptLogprobs, TokenOut
from workers.supervisor.held_job import HeldJob

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

# A prompt of 300 tokens takes 19 steps, about a second.
SLOW = HashModelOptions(step_s=0.05, eos_rate=0.0)
CHUNKS = {"max_num_batched_tokens": 16}
PROMPT = "a prompt in chunks " * 16
OTHER = "another one " * 4
SCORES = tuple(TokenLogprob(i, -float(i)) for i in range(1, 6))  # of positions 1 to 5


def hold(
    *logged: Prompt | Tokens, n: int = 1, num_prompts: int = 1, num_tokens: int = 6
) -> HeldJob:
    """A held job that requests log probabilities of its prompts, with a log."""
    job = Job(
        id="job",
        tenant="t",
        model="m",
        lane="standard",
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=tuple(range(num_tokens)) if num_prompts == 1 else (),
        prompt_list=(tuple(range(num_tokens)),) * num_prompts if num_prompts > 1 else (),
        params=SamplingParams(max_tokens=4, seed=1, n=n, prompt_logprobs=0),
        created_s=0,
    )
    claimed = Claimed(job, 1, 1, len(logged) + 1, "", 0, 100.0, is_alone=False)
    held = HeldJob(claimed, Tokenizer.from_str(hash_tokenizer().tokenizer_json))
    held.replay([LogEntry(k, "", event) for k, event in enumerate(logged, 1)])
    return held


def test_a_long_prompt_is_several_events() -> None:
    """vLLM scores it at once; a resumed job goes on behind what is logged."""
    held = hold(num_tokens=3000)
    scores = tuple(TokenLogprob(i, -1.0) for i in range(1, 3000))
    held.take_prompt(PromptLogprobs("job", 1, 1, scores))
    events = []
    while held.has_news:
        event, _ = held.take_event()
        assert isinstance(event, Prompt)
        events.append(event)
    assert [event.start for event in events] == [1, 1025, 2049]
    assert sum((event.logprobs for event in events), ()) == scores
    assert hold(*events[:2], num_tokens=3000)._scores[0].num_missing == 2999 - 2048


def says(start: int, end: int) -> PromptLogprobs:
    return PromptLogprobs("job", 1, start, SCORES[start - 1 : end - 1])


def test_a_prompt_is_an_event_of_its_own_before_the_output() -> None:
    """The results of several steps are one event; the output follows in the next."""
    held = hold()
    held.take_prompt(says(1, 3))
    held.take_prompt(says(3, 6))
    held.take(TokenOut("job", 1, 0, 0, 65))
    assert held.take_event() == (Prompt(1, SCORES), 0)
    assert held.has_news
    event, num_tokens = held.take_event()
    assert isinstance(event, Tokens)
    assert num_tokens == 1
    assert not held.has_news


def test_repeated_prompt_logprobs_are_logged_once() -> None:
    """After a preemption, and after an earlier worker logged them."""
    held = hold(Prompt(1, SCORES[:2]))
    held.take_prompt(says(1, 3))
    assert not held.has_news
    held.take_prompt(says(1, 5))
    held.take_prompt(says(2, 6))
    assert held.take_event() == (Prompt(3, SCORES[2:]), 0)


def test_output_waits_for_the_prompt() -> None:
    """Output of a choice that is faster than the one that reports the prompt comes after the
    prompt."""
    held = hold(n=2)
    held.take(TokenOut("job", 1, 1, 0, 65))
    assert held.take_event() == (None, 0)
    held.take_prompt(says(1, 6))
    assert held.take_event() == (Prompt(1, SCORES), 0)
    assert held.take_event()[1] == 1


def test_a_prompt_s_output_does_not_wait_for_other_prompts() -> None:
    """It follows its own prompt's log probabilities, and each event names its prompt."""
    held = hold(n=2, num_prompts=2)
    held.take(TokenOut("job", 1, 1, 0, 65))
    held.take(TokenOut("job", 1, 3, 0, 66))
    assert held.take_event() == (None, 0)
    held.take_prompt(PromptLogprobs("job", 1, 1, SCORES, prompt=1))
    assert held.take_event() == (Prompt(1, SCORES, prompt=1), 0)
    event, num_tokens = held.take_event()
    assert isinstance(event, Tokens)
    assert ([delta.choice for delta in event.deltas], num_tokens) == ([3], 1)
    assert not held.has_news
    held.take_prompt(PromptLogprobs("job", 1, 1, SCORES))
    assert held.take_event() == (Prompt(1, SCORES), 0)
    event, _ = held.take_event()
    assert isinstance(event, Tokens)
    assert [delta.choice for delta in event.deltas] == [1]


@pytest.fixture
def caller(functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys) -> Caller:
    return Caller(functions, redis_client, keys)


async def submit(caller: Caller, **params: Any) -> Job:
    return await caller.submit(PROMPT, OTHER, prompt_logprobs=2, n=2, max_tokens=20, **params)


def assert_exact(job: Job, answer: Answer) -> None:
    """Prompt and output are those of an undisturbed hash model."""
    for number, prompt_ids in enumerate(job.prompts):
        expected = expected_prompt_logprobs(prompt_ids, 2)
        logprobs = [TokenLogprob(s.token_id, s.logprob, s.top_logprobs) for s in expected]
        assert answer.prompts[number] == logprobs
        for choice in range(job.params.n):
            ids, _ = expected_output(prompt_ids, job.params, choice=choice, eos_rate=0.0)
            assert answer.token_ids[number * job.params.n + choice] == ids


async def test_a_worker_killed_amid_a_prompt_leaves_no_gap_and_no_repeat(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """kill -9 after a part of the prompt was logged: the next worker logs only the rest."""
    async with fleet(redis_server.url, 1, SLOW, engine=CHUNKS) as [first]:
        job = await submit(caller)

        async def has_part() -> bool:
            return len(await caller.entries(job)) >= 3

        await until(has_part)
        first.kill()
        logged = await caller.entries(job)
        assert all(isinstance(entry.event, Prompt) for entry in logged), "killed amid the prompt"
        assert (await caller.view(job)).first_token_ms is None
        async with fleet(redis_server.url, 1, SLOW):
            assert_exact(job, await caller.answer(job))
            assert (await caller.entries(job))[: len(logged)] == logged


async def test_a_worker_killed_after_scoring_a_prompt_does_not_repeat_it(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """kill -9 after output was logged: the prompt is in the log once."""
    async with fleet(redis_server.url, 1, SLOW) as [first]:
        job = await submit(caller)
        await caller.has_output(job, 4)
        first.kill()
        assert (await caller.view(job)).num_output_tokens < 80, "the test must kill midway"
        async with fleet(redis_server.url, 1, SLOW):
            assert_exact(job, await caller.answer(job))
