"""Log probabilities of prompts in the log: complete, in order, each position once."""

from contract.events import Prompt, TokenLogprob, Tokens
from tests.workers.held import hold, job_of
from workers.ipc.messages import PromptLogprobsOut, TokenOut
from workers.supervisor.held_job import HeldJob

SCORES = tuple(TokenLogprob(i, -float(i)) for i in range(1, 6))  # of positions 1 to 5


def scored(
    *logged: Prompt | Tokens, n: int = 1, num_prompts: int = 1, num_tokens: int = 6
) -> HeldJob:
    """A held job that requests log probabilities of its prompts, with a log."""
    prompts = (tuple(range(num_tokens)),) * num_prompts
    params = {"max_tokens": 4, "seed": 1, "n": n, "prompt_logprobs": 0}
    return hold(job_of(*prompts, params=params), *logged)


def test_a_long_prompt_is_several_events() -> None:
    """vLLM scores it at once; a resumed job goes on behind what is logged."""
    held = scored(num_tokens=3000)
    scores = tuple(TokenLogprob(i, -1.0) for i in range(1, 3000))
    held.take_prompt(PromptLogprobsOut("job", 1, 1, scores))
    events = []
    while held.has_news:
        event, _ = held.take_event()
        assert isinstance(event, Prompt)
        events.append(event)
    assert [event.start for event in events] == [1, 1025, 2049]
    assert sum((event.logprobs for event in events), ()) == scores
    assert scored(*events[:2], num_tokens=3000)._scores[0].num_missing == 2999 - 2048


def says(start: int, end: int) -> PromptLogprobsOut:
    return PromptLogprobsOut("job", 1, start, SCORES[start - 1 : end - 1])


def test_a_prompt_is_an_event_of_its_own_before_the_output() -> None:
    """The results of several steps are one event; the output follows in the next."""
    held = scored()
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
    held = scored(Prompt(1, SCORES[:2]))
    held.take_prompt(says(1, 3))
    assert not held.has_news
    held.take_prompt(says(1, 5))
    held.take_prompt(says(2, 6))
    assert held.take_event() == (Prompt(3, SCORES[2:]), 0)


def test_output_waits_for_the_prompt() -> None:
    """Output of a choice that is faster than the one that reports the prompt comes after the
    prompt."""
    held = scored(n=2)
    held.take(TokenOut("job", 1, 1, 0, 65))
    assert held.take_event() == (None, 0)
    held.take_prompt(says(1, 6))
    assert held.take_event() == (Prompt(1, SCORES), 0)
    assert held.take_event()[1] == 1


def test_a_prompt_s_output_does_not_wait_for_other_prompts() -> None:
    """It follows its own prompt's log probabilities, and each event names its prompt."""
    held = scored(n=2, num_prompts=2)
    held.take(TokenOut("job", 1, 1, 0, 65))
    held.take(TokenOut("job", 1, 3, 0, 66))
    assert held.take_event() == (None, 0)
    held.take_prompt(PromptLogprobsOut("job", 1, 1, SCORES, prompt=1))
    assert held.take_event() == (Prompt(1, SCORES, prompt=1), 0)
    event, num_tokens = held.take_event()
    assert isinstance(event, Tokens)
    assert ([delta.choice for delta in event.deltas], num_tokens) == ([3], 1)
    assert not held.has_news
    held.take_prompt(PromptLogprobsOut("job", 1, 1, SCORES))
    assert held.take_event() == (Prompt(1, SCORES), 0)
    event, _ = held.take_event()
    assert isinstance(event, Tokens)
    assert [delta.choice for delta in event.deltas] == [1]
