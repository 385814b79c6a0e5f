"""In no step does a sequence wait that would be admitted: on our own engine and on a host."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import HashHost
from tests.workers.engine.harness import EOS_RATE, MAX_MODEL_LEN, CallersCap, Harness, Sizes, job
from tests.workers.engine.test_admission_check import num_blocks_for, peak
from tests.workers.vllm_engine.test_placing import Placed
from workers.engine.admission_check import RecentLengths
from workers.engine.interface import Chunk
from workers.engine.sequence import Sequence
from workers.lanes import Lane
from workers.vllm_engine.placing import HostOutput

_LANES = ("interactive", "standard", "batch")
_MOST_STEPS = 2_000


@dataclass(frozen=True)
class Arrival:
    """A job of a random load."""

    lane: str
    tenant: str
    weight: float
    num_prompt: int
    max_tokens: int
    expected_tokens: int  # 0: its caller states none
    n: int
    ignore_eos: bool


@dataclass(frozen=True)
class Turn:
    """What a supervisor does before a step; jobs are named by their numbers."""

    arriving: list[Arrival]
    stopped: int | None
    moved: tuple[int, str] | None


_arrivals = st.builds(
    Arrival,
    st.sampled_from(_LANES),
    st.sampled_from(("ada", "bob", "eve")),
    st.sampled_from((1.0, 2.0)),
    st.integers(1, 12),
    st.integers(1, 20),
    st.sampled_from((0, 3, 20)),
    st.integers(1, 3),
    st.booleans(),
)
_loads = st.lists(
    st.builds(
        Turn,
        st.lists(_arrivals, max_size=4),
        st.none() | st.integers(0, 30),
        st.none() | st.tuples(st.integers(0, 30), st.sampled_from(_LANES)),
    ),
    min_size=1,
    max_size=20,
)
_lanes = st.tuples(
    *[
        st.builds(Lane, st.just(name), st.integers(0, 2), min_share=st.sampled_from((0.0, 0.2)))
        for name in _LANES
    ]
)


def serve(served: Harness | Placed, load: list[Turn]) -> None:
    """Runs a load to its end."""
    num_jobs = 0
    for turn in [*load, *[Turn([], None, None)] * _MOST_STEPS]:
        for new in turn.arriving:
            request = job(
                f"job-{num_jobs}",
                range(num_jobs, num_jobs + new.num_prompt),
                tenant=new.tenant,
                lane=new.lane,
                max_tokens=new.max_tokens,
                expected_tokens=new.expected_tokens,
                n=new.n,
                ignore_eos=new.ignore_eos,
            )
            served.add(msgspec.structs.replace(request, weight=new.weight))
            num_jobs += 1
        if turn.stopped is not None:
            served.engine.stop_job(f"job-{turn.stopped}", 1)
        if turn.moved is not None:
            served.engine.reprioritise(f"job-{turn.moved[0]}", 1, turn.moved[1])
        if served.engine.has_work:
            served.step()
    assert not served.engine.has_work


@settings(max_examples=100, deadline=None)
@given(load=_loads, num_places=st.integers(1, 6), lanes=_lanes)
def test_nothing_waits_for_a_host_with_a_free_place(
    load: list[Turn], num_places: int, lanes: tuple[Lane, ...]
) -> None:
    """A place holds a whole context, so whoever has one lacks nothing until its end."""

    class Watched(HashHost):
        def step(self) -> list[HostOutput]:
            waiting = set(placed.engine.sequences) - set(self.requests)
            assert len(self.requests) == num_places or not waiting
            return super().step()

    host = Watched(num_places, max_model_len=MAX_MODEL_LEN, eos_rate=EOS_RATE)
    placed = Placed(host, list(lanes))
    serve(placed, load)


@pytest.mark.campaign
@settings(max_examples=200, deadline=None)
@given(
    load=_loads,
    num_blocks=st.integers(10, 40),
    block_size=st.integers(4, 16),
    max_num_seqs=st.integers(1, 8),
    high_water=st.sampled_from((0.8, 1.0)),
    lengths=st.sampled_from((CallersCap, RecentLengths)),
    lanes=_lanes,
)
def test_nothing_waits_for_blocks_that_suffice(
    load: list[Turn],
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    high_water: float,
    lengths: type[RecentLengths],
    lanes: tuple[Lane, ...],
) -> None:
    """One of those that wait starts if for each of them there is a place, a token of the budget and
    blocks, even if it and all that run reach their maximum. Whoever loses its blocks in a step, or
    could share a block that is computed in it, waits for the next one."""
    sizes = Sizes(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_batched_tokens=64,
        max_num_seqs=max_num_seqs,
        kv_high_water=high_water,
        prefix_caching=False,
    )
    own = Harness(sizes, lanes=lanes, lengths=lengths())
    held: set[Sequence] = set()

    def would_start(sequence: Sequence, running: list[Sequence]) -> bool:
        together = [*running, sequence]
        num_known = sum(num_blocks_for(s.num_known, block_size) for s in together)
        return (
            len(together) <= max_num_seqs
            and num_known <= int(high_water * num_blocks)
            and peak(together, block_size) <= num_blocks
        )

    def watch(chunks: Seq[Chunk]) -> None:
        running = [s for s in own.engine.sequences if s.block_ids]
        waiting = [s for s in own.engine.sequences if not s.block_ids]
        computing = {chunk.sequence.job_id for chunk in chunks if chunk.num_tokens > 1}
        is_late = any(s in held or s.job_id in computing for s in waiting)
        is_spent = sum(chunk.num_tokens for chunk in chunks) == sizes.max_num_batched_tokens
        if waiting and not is_late and not is_spent:
            assert not all(would_start(s, running) for s in waiting)
        held.clear()
        held.update(running)

    own.watch = watch
    serve(own, load)
