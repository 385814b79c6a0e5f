"""The cost of the scheduler, in Python operations, because times vary between machines."""

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from bench.scheduler import Load, fill, main, make_engine
from workers.engine.engine import Engine
from workers.engine.strategy import Strategies
from workers.strategies import StaticBatching

_NUM_STEPS = 24


def num_operations(load: Load, num_running: int, num_waiting: int) -> int:
    """Python operations of the cheapest of several steps under a load."""
    engine = make_engine(load, num_running, _NUM_STEPS)
    fill(engine, load, num_running, num_waiting, _NUM_STEPS)
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
        engine = make_engine(Load.STEADY, 16, _NUM_STEPS)
        engine.reconfigure(engine.limits, Strategies(StaticBatching(batch_size=16)))
        fill(engine, Load.STEADY, 16, num_waiting, _NUM_STEPS)
        nums.append(min(count_operations(engine, Load.STEADY) for _ in range(_NUM_STEPS)))
    assert nums[0] == nums[1]


def test_admission_cost_hardly_grows_with_waiting_sequences() -> None:
    """Only a binary search grows, with the logarithm."""
    few, many = (num_operations(Load.TURNOVER, 16, num_waiting) for num_waiting in (40, 4_000))
    assert many < 1.1 * few


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


def test_the_command_reports_each_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each load and size, in a table and as JSON."""
    out = tmp_path / "out.json"
    main(["--steps", "3", "--running", "2", "--waiting", "0", "5", "--json", str(out)])
    shown = capsys.readouterr().out.splitlines()
    found = json.loads(out.read_text())
    assert [(f["load"], f["num_running"], f["num_waiting"]) for f in found] == [
        (load, 2, num_waiting) for load in Load for num_waiting in (0, 5)
    ]
    assert len(shown) == 2 + len(found)
    assert all(0 < f["p50_ms"] <= f["p99_ms"] <= f["max_ms"] for f in found)
