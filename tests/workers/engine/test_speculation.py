"""Drafts by prompt lookup: the tokens are those without drafts, no block is lost, and only what is
right counts."""

import dataclasses
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from contract.jobs import SamplingParams
from tests.workers.engine.harness import (
    Harness,
    Sizes,
    all_params,
    all_sizes,
    assert_oracle,
    job,
)
from tests.workers.engine.test_engine_properties import is_possible, request_of
from tests.workers.strategies.test_strategies import all_strategies
from workers.engine.interface import Chunk, Row
from workers.engine.strategy import Strategy

LETTERS = LLMatcher.grammar_from_regex("[ab]{40}")
TEXTS = LLMatcher.grammar_from_regex("[ab]{96}")
# A step costs as much as ten of its tokens, so that half a chance pays.
FAST = {"step_s": 0.010, "token_s": 0.001}
SIZES = Sizes(speculates=True)
ROOMY = Sizes(num_blocks=1024, max_num_batched_tokens=64, max_num_seqs=16, kv_high_water=1.0)


def speculating(sizes: Sizes = SIZES, **changes: object) -> Harness:
    """An engine that knows the time of its steps, which a first job has shown it."""
    harness = Harness(sizes, **{**FAST, **changes})  # type: ignore[arg-type]
    harness.add(job("first", max_tokens=20, ignore_eos=True))
    harness.run()
    return harness


def test_repeated_output_takes_fewer_steps() -> None:
    """One letter over and over: most drafts are right."""
    request = job(max_tokens=36, top_k=1, ignore_eos=True)
    harness, plain = speculating(), speculating(Sizes())
    for each in (harness, plain):
        each.add(request)
        each.run()

    assert harness.output_ids["job", 0] == plain.output_ids["job", 0]
    assert harness.num_accepted >= 8
    assert harness.model.num_steps <= plain.model.num_steps - harness.num_accepted


def test_nothing_is_drafted_where_it_does_not_pay() -> None:
    """A token costs as much alone as in a step of more."""
    harness = speculating(step_s=0.0)
    harness.add(job(max_tokens=36, top_k=1, ignore_eos=True))

    harness.run()

    assert harness.num_accepted == harness.num_rejected == 0


def test_drafts_that_are_half_right_cost_many_streams_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row that draws takes ten times as long as a prompt's token, and hardly less than a
    stream's share of a step; the cost model knows tokens only."""

    def taken_s(sizes: Sizes) -> tuple[float, int]:
        slow = Harness(sizes, step_s=0.004, token_s=0.0001)
        run = slow.model.run

        def run_slowly(chunks: Seq[Chunk], *others: Any) -> list[Row]:
            slow.now_s += 0.001 * sum(len(chunk.sampled) for chunk in chunks)
            return run(chunks, *others)

        monkeypatch.setattr(slow.model, "run", run_slowly)
        for number in range(16):
            prompt_ids = [32 + number] * 128
            slow.add(job(str(number), prompt_ids, grammar=TEXTS, max_tokens=96, seed=number))
        slow.run()
        return slow.clock_s(), slow.num_rejected

    monkeypatch.setattr("tests.workers.engine.harness.MAX_MODEL_LEN", 256)
    plain_s, _ = taken_s(ROOMY)
    drafting_s, num_rejected = taken_s(dataclasses.replace(ROOMY, speculates=True))

    assert drafting_s <= 1.01 * plain_s
    assert num_rejected < 60


def test_a_grammar_may_draft_and_force() -> None:
    """Drafts that the grammar allows, verified with its masks."""
    harness = speculating()
    request = job(grammar=LETTERS, max_tokens=36, seed=3, n=4)
    harness.add(request)

    harness.run()

    assert_oracle(harness, [request])
    assert harness.num_accepted > 0
    assert harness.num_rejected > 0


@settings(max_examples=60, deadline=None)
@given(
    all_params=st.lists(all_params(), min_size=1, max_size=4),
    num_prompt=st.integers(1, 12),
    sizes=all_sizes(),
    strategy=all_strategies(),
    preempts=st.sets(st.integers(0, 60)),
)
def test_drafts_change_no_token_and_lose_no_block(
    all_params: list[SamplingParams],
    num_prompt: int,
    sizes: Sizes,
    strategy: Strategy,
    preempts: set[int],
) -> None:
    """Whatever the blocks, budgets, grammars and preemptions: `Harness.step` audits the blocks and
    overwrites the free ones, and `run` asserts that all are free at the end."""
    sizes = dataclasses.replace(sizes, speculates=True)
    harness = Harness(sizes, strategy, step_s=0.010, token_s=0.001)
    requests = []
    for number, params in enumerate(all_params):
        request = request_of(f"job-{number}", ((97,) * num_prompt,), params)
        if is_possible(request, sizes):
            harness.add(request)
            requests.append(request)
    for number in range(60):
        if not harness.engine.has_work:
            break
        harness.sleep()
        harness.step()
        if number in preempts:
            harness.engine.preempt("job-0")

    harness.run()

    assert_oracle(harness, requests)
