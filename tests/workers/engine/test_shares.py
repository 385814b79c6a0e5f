"""Minimum shares and fairness, for any lanes and arrivals."""

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.engine.harness import Harness, Sizes, job
from workers.engine.interface import Chunk
from workers.lanes import Lane

NAMES = ("first", "second", "third")
NUM_FLOOD = 12  # prompt tokens of each job of the flood
Arrivals = list[tuple[int, int, int]]  # steps until the next, prompt tokens, output tokens


def lane_mixes() -> st.SearchStrategy[list[Lane]]:
    """Any priorities, and shares that leave something or nothing to the others."""
    parts = st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(lambda p: sum(p) > max(p))
    priorities = st.lists(st.integers(0, 3), min_size=3, max_size=3)
    return st.tuples(parts, priorities).map(
        lambda drawn: [
            Lane(name, priority, min_share=part / sum(drawn[0]))
            for name, part, priority in zip(NAMES, drawn[0], drawn[1], strict=False)
        ]
    )


@pytest.mark.campaign
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lanes=lane_mixes(),
    budget=st.integers(8, 40),
    pauses=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 60)),
)
def test_each_lane_with_work_gets_its_minimum_share_of_every_window(
    lanes: list[Lane], budget: int, pauses: dict[str, int]
) -> None:
    """Of any n tokens computed in a row while it has work, a lane gets at least min_share * n
    less two budgets: of 20 budgets / min_share in a row, nine tenths of its share.
    """
    harness = Harness(
        Sizes(2000, 4, budget, max_num_seqs=2000, kv_high_water=1.0, prefix_caching=False),
        lanes=lanes,
    )
    deficits: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(70):
        live = [n for n in NAMES if not 0 <= number - pauses.get(n, 1000) < 15]
        for name in live:
            keep_prompts(harness, name, budget, number)
        gained = computed(harness)
        for lane in lanes:
            due = lane.min_share * gained.total() - gained[lane.name]
            deficits[lane.name] = [*deficits[lane.name], due] if lane.name in live else []
            assert most_of_any_window(deficits[lane.name]) <= 2 * budget


@pytest.mark.campaign
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 12), st.integers(1, 25)),
        min_size=4,
        max_size=25,
    ),
    num_blocks=st.integers(16, 60),
    budget=st.integers(8, 40),
    ageing_tokens=st.sampled_from((50, 400, 32_768)),
)
def test_a_light_tenant_stays_within_the_bound_however_it_comes(
    arrivals: Arrivals, num_blocks: int, budget: int, ageing_tokens: int
) -> None:
    """In any window in which both have work, the light tenant has at most 2 * max(w_in * longest
    input, w_out * tokens of KV) and one budget less than the flood, which is older than any age.
    """
    harness = Harness(
        Sizes(num_blocks, 4, budget, max_num_seqs=8, prefix_caching=False),
        lanes=[Lane("lane", 1, ageing_tokens=ageing_tokens)],
    )
    bound = 2 * max(1.0 * NUM_FLOOD, 2.0 * harness.sizes.num_kv_tokens) + budget
    flood(harness)
    behind: list[float] = []
    for light in come_and_go(arrivals):
        for number, (num_prompt, num_out) in light:
            params = {"tenant": "light", "max_tokens": num_out, "ignore_eos": True}
            harness.add(job(f"light-{number}", [number, *range(num_prompt - 1)], **params))  # type: ignore[arg-type]
        gained = served(harness)
        both = {s.tenant for s in harness.engine.sequences} == {"flood", "light"}
        behind = [*behind, gained["flood"] - gained["light"]] if both else []
        assert most_of_any_window(behind) <= bound


def keep_prompts(harness: Harness, lane: str, num_tokens: int, number: int) -> None:
    """Keeps at least this many uncomputed tokens in a lane."""
    num_pending = sum(s.num_pending for s in harness.engine.sequences if s.lane == lane)
    for extra in range(-(-max(0, num_tokens - num_pending) // 20)):
        harness.add(job(f"{lane}-{number}-{extra}", range(20), lane=lane, max_tokens=1))


def computed(harness: Harness) -> Counter[str]:
    """Runs a step; returns the computed tokens by lane."""
    gained: Counter[str] = Counter()

    def watch(chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            gained[chunk.sequence.lane] += chunk.num_tokens

    harness.watch = watch
    harness.step()
    return gained


def flood(harness: Harness) -> None:
    """One tenant's work, more than the test computes, which has all places."""
    for i in range(150):
        prompt_ids = [i, *range(NUM_FLOOD - 1)]
        harness.add(job(f"flood-{i}", prompt_ids, tenant="flood", max_tokens=20, ignore_eos=True))
    for _ in range(10):
        harness.step()


def come_and_go(arrivals: Arrivals) -> Iterable[list[tuple[int, tuple[int, int]]]]:
    """Arrivals by step: number of jobs, prompt and output tokens; then none for a while."""
    coming: list[tuple[int, tuple[int, int]]] = []
    for number, (num_steps, *sizes) in enumerate(arrivals):
        coming.append((number, (sizes[0], sizes[1])))
        for _ in range(num_steps):
            yield coming
            coming = []
    yield coming
    yield from ([] for _ in range(60))


def served(harness: Harness) -> Counter[str]:
    """Runs a step; returns each tenant's service, with weights 1 and 2 for input and output."""
    gained: Counter[str] = Counter()
    before = {s: min(s.num_once_computed, s.num_prompt) for s in harness.engine.sequences}
    tenants = {sequence.job_id: sequence.tenant for sequence in before}
    report = harness.step()
    for sequence, num in before.items():
        gained[sequence.tenant] += min(sequence.num_once_computed, sequence.num_prompt) - num
    for output in report.outputs:
        gained[tenants[output.job_id]] += 2
    return gained


def most_of_any_window(steps: list[float]) -> float:
    """The largest sum over consecutive steps that include the last one."""
    return max(accumulate(reversed(steps)), default=0.0)
