"""Which sequences get tokens and blocks in a step, and which wait."""

from contract.jobs import SamplingParams
from workers.engine.block_manager import BlockManager
from workers.engine.interface import Chunk, EngineLimits
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence
from workers.engine.step_plan import StepPlan


def scheduler_of(
    num_blocks: int = 100,
    block_size: int = 1,
    budget: int = 100,
    max_num_seqs: int = 10,
    high_water: float = 1.0,
) -> Scheduler:
    limits = EngineLimits(budget, max_num_seqs, vocab_size=1000, kv_high_water=high_water)
    blocks = BlockManager(num_blocks, block_size)
    return Scheduler(blocks, limits)


def add(scheduler: Scheduler, arrival: int, num_prompt: int, tenant: str = "t") -> Sequence:
    """A waiting sequence, identified by its arrival."""
    params = SamplingParams(max_tokens=1000, seed=0)
    prompt_ids = [0] * num_prompt
    sequence = Sequence(f"job-{arrival}", 1, 0, tenant, "lane", prompt_ids, num_prompt, params)
    sequence.arrival = arrival
    scheduler.add(sequence)
    scheduler.admit([sequence])
    return sequence


def compute(plan: StepPlan) -> dict[int, int]:
    """Acts as model and engine. Returns the computed tokens by arrival."""
    for sequence, chunk in plan.chunks.items():
        sequence.num_computed += chunk.num_tokens
        if chunk.samples:
            sequence.token_ids.append(0)
    return {sequence.arrival: chunk.num_tokens for sequence, chunk in plan.chunks.items()}


def step(scheduler: Scheduler) -> dict[int, int]:
    return compute(scheduler.plan(0.0))


def test_streams_go_before_a_long_prompt() -> None:
    """An older sequence with many uncomputed tokens does not delay a younger stream."""
    scheduler = scheduler_of(budget=10)
    old, young = add(scheduler, arrival=0, num_prompt=3), add(scheduler, arrival=1, num_prompt=3)
    step(scheduler)
    old.token_ids += [0] * 50

    assert step(scheduler) == {1: 1, 0: 9}
    assert young.num_pending == 1


def test_a_sequence_is_admitted_into_what_is_left_of_the_budget() -> None:
    """The running sequence gets its one token, the next prompt the other nine."""
    scheduler = scheduler_of(budget=10)
    add(scheduler, arrival=0, num_prompt=4)
    step(scheduler)
    add(scheduler, arrival=1, num_prompt=30)
    add(scheduler, arrival=2, num_prompt=30)

    assert step(scheduler) == {0: 1, 1: 9}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_prompt_tokens_still_to_come_count_against_the_mark() -> None:
    """A long prompt counts with all its blocks once its first chunk is computed."""
    scheduler = scheduler_of(num_blocks=20, budget=4, high_water=0.8)
    add(scheduler, arrival=0, num_prompt=15)
    step(scheduler)
    add(scheduler, arrival=1, num_prompt=2)
    for _ in range(2):
        step(scheduler)

    assert scheduler.blocks.num_free > 2
    assert scheduler.num_waiting == 1


def test_without_blocks_the_worst_key_is_preempted_and_keeps_its_place() -> None:
    """The youngest loses its blocks to the oldest, and runs again before a later arrival."""
    scheduler = scheduler_of(num_blocks=9)
    sequences = [add(scheduler, arrival, num_prompt=3) for arrival in range(3)]
    step(scheduler)
    add(scheduler, arrival=3, num_prompt=1)

    plan = scheduler.plan(0.0)
    compute(plan)
    scheduler.remove(sequences[0])

    assert len(plan.preempted) == 1
    assert sequences[2].num_preemptions == 1
    assert list(plan.chunks) == sequences[:2]
    assert list(step(scheduler)) == [1, 2]


def test_tokens_of_a_preempted_sequence_go_back_to_the_budget() -> None:
    """It had its token of this step already when a more important one took its block."""
    scheduler = scheduler_of(num_blocks=7, budget=3)
    large = add(scheduler, arrival=0, num_prompt=3)
    step(scheduler)
    small = add(scheduler, arrival=1, num_prompt=2, tenant="u")
    step(scheduler)
    scheduler.account([Chunk(large, 3, 1, samples=True)])  # its tenant has got more
    small.token_ids += [0] * 5

    plan = scheduler.plan(0.0)

    assert list(plan.chunks) == [small]
    assert plan.num_tokens_left == 0
    assert plan.chunks[small].num_tokens == 3
    assert (large.block_ids, large.num_computed) == ([], 0)


def test_the_worst_sequence_waits_and_keeps_its_blocks() -> None:
    """The youngest needs a block that an older one has: it computes nothing and loses nothing."""
    scheduler = scheduler_of(num_blocks=4, block_size=2)
    add(scheduler, arrival=0, num_prompt=3)
    young = add(scheduler, arrival=1, num_prompt=4)
    step(scheduler)

    plan = scheduler.plan(0.0)

    assert [sequence.arrival for sequence in plan.chunks] == [0]
    assert len(plan.preempted) == 0
    assert (len(young.block_ids), young.num_computed) == (2, 4)


def test_a_preempted_sequence_is_not_taken_back_in_the_same_step() -> None:
    """Both sequences do not fit, whatever the high-water mark."""
    scheduler = scheduler_of(num_blocks=6, high_water=1.0)
    old, young = add(scheduler, arrival=0, num_prompt=3), add(scheduler, arrival=1, num_prompt=3)
    step(scheduler)

    plan = scheduler.plan(0.0)

    assert list(plan.chunks) == [old]
    assert scheduler.running == [old]
    assert young.num_preemptions == 1
