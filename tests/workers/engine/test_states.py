"""States beside the blocks: each sequence has one, and prefixes are shared where one was kept.

The hash model asserts that a chunk starts from the state of exactly the tokens before it; the
property tests and the state machine of this folder run with states too.
"""

import pytest

from contract.jobs import SamplingParams
from tests.workers.engine.harness import Harness, Sizes, job, oracle
from workers.engine.interface import Chunk
from workers.engine.sequence import Sequence
from workers.engine.states import StateSlots
from workers.engine.strategy import ContinuousBatching, Strategies
from workers.lanes import DEFAULT_LANES

PROMPT = tuple(range(10, 29))  # 19 tokens: four blocks of four, and three tokens
SYSTEM = tuple(range(10, 24))  # 14 tokens: three blocks, and two tokens


def hits(harness: Harness, name: str, prompt: tuple[int, ...]) -> int:
    """How many of its tokens a job finds, once it is the only one."""
    harness.add(job(name, prompt, max_tokens=1))
    found = harness.step().num_prefix_hits
    harness.run()
    return found


def test_an_equal_prompt_starts_from_the_state_at_its_last_block_end() -> None:
    """Also one of whole blocks, whose last token is computed again."""
    harness = Harness(Sizes(num_kept_states=4))

    assert hits(harness, "first", PROMPT) == 0
    assert hits(harness, "second", PROMPT) == 16
    assert hits(harness, "third", PROMPT[:16]) == 0
    assert hits(harness, "fourth", PROMPT[:16]) == 12


def test_the_next_turn_starts_behind_the_answer() -> None:
    """At its latest block end; those before it are not kept."""
    harness = Harness(Sizes(num_kept_states=8))
    harness.add(job("first", PROMPT, max_tokens=12, ignore_eos=True))
    harness.run()
    turn = (*PROMPT, *harness.output_ids["first", 0], 7, 8, 9)  # 30 of these are computed

    assert hits(harness, "earlier", turn[:27]) == 16
    assert hits(harness, "next", turn) == 28


def test_where_prompts_branch_off_the_state_is_kept_by_the_second() -> None:
    """The first of a shared beginning cannot know where it ends."""
    harness = Harness(Sizes(num_kept_states=8))
    prompts = [(*SYSTEM, *range(30 + 7 * n, 37 + 7 * n)) for n in range(3)]

    assert [hits(harness, str(n), prompt) for n, prompt in enumerate(prompts)] == [0, 0, 12]


@pytest.mark.parametrize(("num_kept", "expected"), [(0, 0), (1, 0), (2, 16)])
def test_the_least_recently_used_state_goes_first(num_kept: int, expected: int) -> None:
    """With its block still cached, the prefix is computed again."""
    harness = Harness(Sizes(num_kept_states=num_kept))
    hits(harness, "first", PROMPT)
    hits(harness, "other", tuple(range(40, 59)))

    assert hits(harness, "again", PROMPT) == expected


def test_a_state_stays_until_who_starts_from_it_has_read_it() -> None:
    """Also if a sequence that was admitted gets no tokens in that step: others keep none then."""
    states = StateSlots(num_slots=3, num_running=2, block_size=4)
    first, second, other = (_sequence(name) for name in ("same", "same", "other"))
    states.start(first, 0, 0)
    states.plan_saves([Chunk(first, 0, 9, samples=True)])
    assert first.state is not None
    [(end, kept)] = first.state.saves
    states.end(first)
    states.start(second, 2, 2)
    states.start(other, 0, 0)
    assert second.state is not None
    assert other.state is not None

    states.plan_saves([Chunk(other, 0, 9, samples=True)])
    assert (second.state.source, second.state.source_end) == (kept, end) == (2, 8)
    assert list(other.state.saves) == []
    states.plan_saves([Chunk(second, 8, 1, samples=True)])
    states.plan_saves([Chunk(second, 9, 1, samples=True)])
    states.plan_saves([Chunk(other, 0, 9, samples=True)])
    assert list(other.state.saves) == [(8, kept)]
    states.audit([second, other])


def _sequence(name: str) -> Sequence:
    """Nine tokens, with keys for its two full blocks."""
    params = SamplingParams(max_tokens=4, seed=0)
    keys = [f"{name} {number}".encode() for number in range(2)]
    return Sequence(name, 1, 0, "t", "lane", list(range(9)), 9, params, block_keys=keys)


def test_a_preempted_sequence_goes_on_from_its_latest_state() -> None:
    """It computes what follows its last block end again."""
    harness = Harness(Sizes(num_kept_states=8))
    request = job("job", PROMPT, max_tokens=12, ignore_eos=True)
    harness.add(request)
    for _ in range(7):
        harness.step()
    harness.engine.preempt("job")

    report = harness.step()

    assert report.num_recomputed_tokens == 1  # of 25; the state at 24 was kept
    harness.run()
    assert harness.output_ids["job", 0] == oracle(request)["job", 0][0]


def test_choices_share_their_prompt_up_to_a_block_end() -> None:
    """No block is copied, as a state cannot go back to another position."""
    harness = Harness(Sizes(num_kept_states=8))
    request = job("job", PROMPT, n=3, min_tokens=5)
    harness.add(request)

    assert harness.step().num_step_tokens == 19
    assert harness.step().num_step_tokens == 1 + 3 + 3
    harness.run()
    assert harness.output_ids == {key: ids for key, (ids, _) in oracle(request).items()}


def test_no_more_run_than_had_a_slot_at_the_start() -> None:
    """Also if the operator allows more later."""
    harness = Harness(Sizes(max_num_seqs=2, num_kept_states=3))
    harness.reconfigure(
        Sizes(max_num_seqs=5, num_kept_states=0), Strategies(ContinuousBatching()), DEFAULT_LANES
    )
    for number in range(5):
        harness.add(job(f"job-{number}", (number, *PROMPT), ignore_eos=True))

    assert harness.step().num_running == 2
    harness.run()
