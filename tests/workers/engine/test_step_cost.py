"""The cost of the scheduler, in Python operations, because times vary between machines."""

import sys
from collections.abc import Sequence as Seq
from enum import StrEnum
from types import FrameType
from typing import Any

import msgspec
import pytest

from contract.jobs import SamplingParams
from workers.engine.engine import Engine
from workers.engine.interface import Chunk, Padding, Row, Sample
from workers.engine.masks import StepMasks
from workers.engine.strategy import StaticBatching, Strategies
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions, Request

_NUM_STEPS = 24
NUM_TENANTS = 20
# Waiting sequences must not displace running ones.
RUNNING_LANES, WAITING_LANES = ("interactive", "standard"), ("standard", "batch")
_VOCAB_SIZE = 32_000
_BLOCK_SIZE = 16
_PROMPT_TOKENS = 64
_MAX_MODEL_LEN = 2**20
_NUM_BEFORE = 64  # output tokens a stream may produce while others start


class Load(StrEnum):
    """Why sequences wait, and for how long."""

    STEADY = "steady"  # no free place, and none ends
    TURNOVER = "turnover"  # in each step one ends and a waiting one starts
    MEMORY = "memory"  # free places, but no free blocks


class NoArithmetic:
    """A Model that only returns a token for each sampling chunk; a step takes a millisecond of its
    clock, as what an engine does depends on what its steps take."""

    block_size = _BLOCK_SIZE
    shares_blocks = True
    num_state_slots = 0
    max_model_len = _MAX_MODEL_LEN
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.now_s = 0.0
        self._sample = Sample(4)

    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: StepMasks | None = None
    ) -> list[Row]:
        self.now_s += 1e-3
        return [self._sample if chunk.samples else None for chunk in chunks]


def make_engine(load: Load, num_running: int) -> Engine:
    """Returns an engine with memory for the streams; under MEMORY for no more."""
    num_blocks = num_running * -(-_most_tokens(num_running) // _BLOCK_SIZE)
    options = EngineOptions(
        model_path="",
        max_num_seqs=num_running,
        max_num_batched_tokens=2048,
        kv_high_water=1.0,
    )
    if load is Load.MEMORY:
        # One block more than each prompt: growth exceeds the mark, so nobody is admitted.
        num_allowed = num_running * (_PROMPT_TOKENS // _BLOCK_SIZE + 1)
        options = msgspec.structs.replace(
            options, max_num_seqs=4 * num_running, kv_high_water=(num_allowed + 0.5) / num_blocks
        )
    model = NoArithmetic(num_blocks)
    return build_engine(model, _VOCAB_SIZE, options, clock_s=lambda: model.now_s)


def fill(engine: Engine, load: Load, num_running: int, num_waiting: int) -> None:
    """Starts running sequences, then adds waiting ones."""
    for number in range(num_running):
        # Under TURNOVER they end one by one.
        num_output = _most_tokens(num_running) - _PROMPT_TOKENS
        if load is Load.TURNOVER:
            num_output = _NUM_BEFORE + number
        _add(engine, number, RUNNING_LANES, num_output)
    while engine.step().num_decode_tokens < num_running:
        assert engine.has_work, "the first ended before the last began"
    for number in range(num_running, num_running + num_waiting):
        _add(engine, number, WAITING_LANES, num_running)


def _most_tokens(num_running: int) -> int:
    """The number of tokens of one sequence, at its end."""
    return _PROMPT_TOKENS + _NUM_BEFORE + num_running + _NUM_STEPS


def _add(engine: Engine, number: int, lanes: Seq[str], num_output: int) -> None:
    prompt_ids = tuple(
        4 + (7919 * number + 31 * i) % (_VOCAB_SIZE - 4) for i in range(_PROMPT_TOKENS)
    )
    engine.add(
        Request(
            job_id=str(number),
            epoch=1,
            tenant=f"tenant-{number % NUM_TENANTS}",
            lane=lanes[number % len(lanes)],
            prompts=(prompt_ids,),
            params=SamplingParams(max_tokens=num_output, seed=number, ignore_eos=True),
            outputs=((),),
            finished=(False,),
        )
    )


def num_operations(load: Load, num_running: int, num_waiting: int) -> int:
    """Python operations of the cheapest of several steps under a load."""
    engine = make_engine(load, num_running)
    fill(engine, load, num_running, num_waiting)
    return min(count_operations(engine, load) for _ in range(_NUM_STEPS))


def count_operations(engine: Engine, load: Load) -> int:
    """Python operations of one step; under TURNOVER, of a step in which a sequence begins."""
    num = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num += event == "opcode"
        return trace

    while True:
        before, num = sys.gettrace(), 0
        sys.settrace(trace)
        try:
            report = engine.step()
        finally:
            sys.settrace(before)
        if load is not Load.TURNOVER or report.num_prefix_queries > 0:
            return num


@pytest.mark.parametrize("load", [Load.STEADY, Load.MEMORY])
def test_waiting_sequences_cost_a_step_nothing(load: Load) -> None:
    """A step executes the same number of operations with a hundred times as many waiting
    sequences."""
    few, many = (num_operations(load, 16, num_waiting) for num_waiting in (40, 4_000))
    assert few == many


def test_sequences_held_back_cost_a_step_nothing() -> None:
    """A static strategy that waits for its batch is consulted only when a sequence arrives or
    ends."""
    nums = []
    for num_waiting in (40, 4_000):
        engine = make_engine(Load.STEADY, 16)
        engine.reconfigure(engine.limits, Strategies(StaticBatching(batch_size=16)))
        fill(engine, Load.STEADY, 16, num_waiting)
        nums.append(min(count_operations(engine, Load.STEADY) for _ in range(_NUM_STEPS)))
    assert nums[0] == nums[1]


def test_waiting_sequences_cost_an_admission_nothing() -> None:
    """As long as no tenant runs out of them."""
    few, many = (num_operations(Load.TURNOVER, 16, num_waiting) for num_waiting in (100, 4_000))
    assert few == many


@pytest.mark.parametrize("load", [Load.STEADY, Load.TURNOVER])
def test_the_cost_of_a_step_is_linear_in_running_sequences(load: Load) -> None:
    """Four times as many running sequences cost at most four times as much."""
    few, many = (num_operations(load, num_running, 400) for num_running in (16, 64))
    assert few < many <= 4 * few


@pytest.mark.parametrize(("load", "most"), [(Load.STEADY, 200), (Load.TURNOVER, 400)])
def test_running_sequences_cost_few_operations(load: Load, most: int) -> None:
    """Common work is done once for all of them."""
    few, many = (num_operations(load, num_running, 400) for num_running in (16, 64))
    assert (many - few) / (64 - 16) < most
