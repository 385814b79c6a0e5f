"""The prefix cache finds computed blocks, for their own tenant only, and never wrongly."""

import random
from collections import defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.workers.engine.harness import Harness, Sizes, job, oracle

PROMPT = tuple(range(10, 29))  # 19 tokens: four blocks of four, and three tokens


def test_an_equal_prompt_is_found_but_for_its_last_tokens() -> None:
    """16 of 19 tokens are hits; the others are computed."""
    harness = Harness(Sizes())
    harness.add(job("first", PROMPT))
    harness.run()
    harness.add(job("second", PROMPT))

    report = harness.step()

    assert (report.num_prefix_queries, report.num_prefix_hits) == (19, 16)
    assert report.num_step_tokens == 3


def test_the_last_token_is_always_computed() -> None:
    """A prompt of whole blocks that is cached completely: its last block is computed again."""
    harness = Harness(Sizes())
    harness.add(job("first", PROMPT[:16]))
    harness.run()
    harness.add(job("second", PROMPT[:16]))

    assert harness.step().num_step_tokens == 4


def test_tenants_never_share() -> None:
    """Another tenant's equal prompt is computed from its first token."""
    harness = Harness(Sizes())
    harness.add(job("first", PROMPT))
    harness.run()
    harness.add(job("second", PROMPT, tenant="other"))

    assert harness.step().num_prefix_hits == 0


def test_a_sequence_waits_for_a_prefix_that_another_computes() -> None:
    """Three equal prompts at once: one is computed, and the others continue from its progress."""
    harness = Harness(Sizes())
    for name in ("a", "b", "c"):
        harness.add(job(name, PROMPT, ignore_eos=True))

    first, second = harness.step(), harness.step()

    assert (first.num_step_tokens, first.num_waiting) == (19, 2)
    assert second.num_prefix_hits == 32
    assert second.num_step_tokens == 1 + 3 + 3


def test_a_preempted_sequence_finds_its_cached_blocks() -> None:
    """Only what follows its last full block is computed again and counted as recomputed."""
    harness = Harness(Sizes())
    harness.add(job("job", PROMPT, ignore_eos=True))
    harness.step()
    harness.engine.preempt("job")

    report = harness.step()

    assert (report.num_step_tokens, report.num_recomputed_tokens) == (4, 3)


def test_scored_prompts_are_computed() -> None:
    """Log probabilities of a prompt require computing it."""
    harness = Harness(Sizes())
    harness.add(job("first", PROMPT))
    harness.run()
    harness.add(job("second", PROMPT, prompt_logprobs=0))

    assert harness.step().num_step_tokens == 19


def test_choices_share_their_prompt_and_copy_its_last_block() -> None:
    """Four choices of a prompt of 19 tokens hold 8 blocks, not 20; three of them compute one
    token."""
    counts = {}
    for n in (1, 4):
        harness = Harness(Sizes(prefix_caching=False))
        request = job("job", PROMPT, n=n, min_tokens=5)
        harness.add(request)
        harness.step()
        second = harness.step()
        counts[n] = 64 - second.num_free_blocks, second.num_step_tokens
        harness.run()
        assert harness.output_ids == {key: ids for key, (ids, _) in oracle(request).items()}

    assert counts == {1: (5, 1), 4: (4 + 4, 4)}


def test_free_blocks_whose_content_is_kept_are_counted() -> None:
    """Those of a sequence that has ended, until they are evicted. Then they are not found."""
    harness = Harness(Sizes())
    assert harness.step().num_cached_blocks == 0
    harness.add(job("first", PROMPT))
    harness.run()
    last = harness.step()
    assert last.num_free_blocks == 64
    assert last.num_cached_blocks == 4
    harness.engine.evict_cache()
    assert harness.step().num_cached_blocks == 0
    harness.add(job("second", PROMPT))
    assert harness.step().num_prefix_hits == 0


def num_common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


BRANCHES = st.lists(st.integers(1, 2), min_size=1, max_size=30)  # which share their beginnings


@given(
    arriving=st.lists(
        st.tuples(
            st.lists(BRANCHES, min_size=1, max_size=3),
            st.sampled_from("tu"),
            st.integers(1, 3),
            st.integers(1, 8),
        ),
        min_size=1,
        max_size=6,
    ),
    budget=st.sampled_from((3, 8, 32)),
    preempts=st.randoms(use_true_random=False),
)
def test_each_prompt_tells_once_what_was_found_when_it_began(
    arriving: list[tuple[list[list[int]], str, int, int]], budget: int, preempts: random.Random
) -> None:
    """Of jobs one after another: the full blocks that it shares with an earlier sequence of its
    tenant, but for its last token; none of its own choices, of which one begins first, nor what it
    finds after a preemption. Of a job's own prompts, at most as much."""
    harness = Harness(Sizes(num_blocks=1_000, max_num_batched_tokens=budget))
    known = defaultdict[str, list[list[int]]](list)  # by tenant: what is computed
    for number, (prompts, tenant, n, max_tokens) in enumerate(arriving):
        first, *more = prompts
        params: dict[str, Any] = {"n": n, "max_tokens": max_tokens, "ignore_eos": True}
        harness.add(job(f"{number}", first, more_prompts=more, tenant=tenant, **params))
        told = defaultdict[int, list[int]](list)
        while harness.engine.has_work:
            if preempts.random() < 0.1:
                harness.engine.preempt(f"{number}")
            harness.sleep()
            for found in harness.step().prefixes:
                told[found.choice // n].append(found.num_tokens)
        for index, prompt in enumerate(prompts):
            shared = max((num_common(prompt, other) for other in known[tenant]), default=0)
            before = min(shared, len(prompt) - 1) // 4 * 4
            assert len(told[index]) <= 1
            [num_found] = told[index] or [0]
            if len(prompts) == 1:
                assert num_found == before
            assert before <= num_found <= (len(prompt) - 1) // 4 * 4
        known[tenant] += [
            prompts[choice // n] + ids[:-1]
            for (job_id, choice), ids in harness.output_ids.items()
            if job_id == f"{number}"
        ]
