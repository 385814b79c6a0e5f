"""Admission and preemption, compared with a forecast that examines every moment."""

from hypothesis import given, settings
from hypothesis import strategies as st

from contract.jobs import SamplingParams
from tests.workers.engine.harness import CallersCap
from workers.engine.admission_check import AdmissionCheck, AdmissionVerdict
from workers.engine.block_manager import BlockManager
from workers.engine.cost_model import CostModel
from workers.engine.interface import EngineLimits
from workers.engine.order import Lanes
from workers.engine.sequence import Sequence
from workers.engine.step_plan import RunningSequences, StepPlan
from workers.lanes import DEFAULT_LANES

_BLOCK_SIZE = 4
_PRIORITY = {lane.name: lane.priority for lane in DEFAULT_LANES}

# Lane, prompt tokens, output tokens, future tokens, preemptions so far.
_shapes = st.tuples(
    st.sampled_from(sorted(_PRIORITY)),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(1, 20),
    st.integers(0, 3),
)


def sequence_of(arrival: int, shape: tuple[str, int, int, int, int]) -> Sequence:
    """A sequence whose output reaches its maximum."""
    lane, num_prompt, num_output, num_more, num_preemptions = shape
    params = SamplingParams(max_tokens=num_output + num_more, seed=0)
    tokens = [0] * (num_prompt + num_output)
    sequence = Sequence(f"job-{arrival}", 1, 0, "t", lane, tokens, num_prompt, params)
    sequence.arrival, sequence.num_preemptions = arrival, num_preemptions
    return sequence


def running_of(sequences: list[Sequence]) -> RunningSequences:
    running = RunningSequences()
    for sequence in sequences:
        running.add(sequence)
    return running


def num_more(sequence: Sequence) -> int:
    return sequence.max_output - sequence.num_output


def num_blocks_for(num_tokens: int, block_size: int = _BLOCK_SIZE) -> int:
    return -(-num_tokens // block_size)


def peak(growing: list[Sequence], block_size: int = _BLOCK_SIZE) -> int:
    """The most blocks at any moment, if all get a token at each and end at their maximum."""
    return max(
        sum(
            num_blocks_for(s.num_known + moment, block_size)
            for s in growing
            if num_more(s) >= moment
        )
        for moment in range(1 + max(map(num_more, growing)))
    )


def fits(
    limits: EngineLimits, num_blocks: int, running: list[Sequence], growing: list[Sequence]
) -> bool:
    """Whether these sequences, some of which grow, have blocks at every moment until the last
    ends."""
    if len(running) == 1:
        return True
    num_known = sum(num_blocks_for(s.num_known) for s in running)
    return (
        len(running) <= limits.max_num_seqs
        and num_known <= int(limits.kv_high_water * num_blocks)
        and max(num_known, peak(growing)) <= num_blocks
    )


@settings(max_examples=400)
@given(
    shapes=st.lists(_shapes, max_size=6),
    asking=_shapes,
    max_num_seqs=st.integers(1, 7),
    num_spare=st.integers(0, 12),
    high_water=st.sampled_from([0.5, 0.8, 1.0]),
)
def test_admission_preempts_as_few_sequences_as_possible(
    shapes: list[tuple[str, int, int, int, int]],
    asking: tuple[str, int, int, int, int],
    max_num_seqs: int,
    num_spare: int,
    high_water: float,
) -> None:
    """Of unpinned sequences in lower lanes, those with the least to lose are preempted, and no
    others."""
    limits = EngineLimits(100, max_num_seqs, vocab_size=10, kv_high_water=high_water)
    running = [sequence_of(arrival, shape) for arrival, shape in enumerate(shapes)]
    candidate = sequence_of(len(running), asking)
    num_blocks = 1 + num_spare + sum(num_blocks_for(s.num_known) for s in running)
    blocks, lanes = BlockManager(num_blocks, _BLOCK_SIZE), Lanes(DEFAULT_LANES, 100)
    for sequence in [*running, candidate]:
        lanes.arrive(sequence)
    for sequence in running:
        blocks.grow(sequence, sequence.num_known)
        sequence.num_computed = sequence.num_known - 1
    gate = AdmissionCheck(blocks, limits, lanes, CallersCap(), running_of(running))

    verdict, entry = gate.ask(StepPlan(CostModel(), 100), candidate)

    priority = _PRIORITY[candidate.lane]
    yielding = [s for s in running if _PRIORITY[s.lane] > priority and not gate.is_pinned(s)]
    yielding.sort(key=lambda s: (-_PRIORITY[s.lane], s.num_computed, -s.arrival))
    growing = [candidate, *(s for s in running if s not in yielding)]
    expected = next(
        (
            yielding[:num]
            for num in range(len(yielding) + 1)
            if fits(limits, num_blocks, growing + yielding[num:], growing)
        ),
        None,
    )
    assert (entry.victims if entry else None) == expected
    assert verdict is (AdmissionVerdict.NO_ROOM if expected is None else AdmissionVerdict.ADMIT)
