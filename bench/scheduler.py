"""Measures the engine's bookkeeping per step: python -m bench.scheduler [--json OUT]

Uses the engine as workers build it, with a model that computes nothing. Times steps with given
numbers of running and waiting sequences; every running sequence gets a token per step.
"""

import argparse
import gc
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from enum import StrEnum

import msgspec

from contract.jobs import SamplingParams
from infra.tables import markdown_table, percentile, write
from workers.engine.engine import Engine
from workers.engine.interface import Chunk, Padding, Row, Sample
from workers.engine.masks import StepMasks
from workers.engine_process.engine_setup import build_engine
from workers.ipc.jobs import Request
from workers.ipc.messages import EngineOptions

RUNNING = (16, 64, 256)
WAITING = (0, 1_000, 10_000)
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
    """A Model that only returns a token for each sampling chunk."""

    block_size = _BLOCK_SIZE
    shares_blocks = True
    runs_ahead = False
    max_model_len = _MAX_MODEL_LEN
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._sample = Sample(4)

    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: StepMasks | None = None
    ) -> list[Row]:
        return [self._sample if chunk.samples else None for chunk in chunks]


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of host time per step."""

    load: Load
    num_running: int
    num_waiting: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def measure(load: Load, num_running: int, num_waiting: int, num_steps: int) -> Figures:
    """Starts the sequences, then times steps."""
    engine = make_engine(load, num_running, num_steps)
    fill(engine, load, num_running, num_waiting, num_steps)
    gc.collect()
    host_s = []
    next_number = num_running + num_waiting
    for _ in range(num_steps):
        start_s = time.perf_counter()
        report = engine.step()
        host_s.append(time.perf_counter() - start_s - report.step_s)
        assert report.num_step_seqs == num_running, "as many run as are to be measured"
        for _ in range(report.num_finished):  # replace those that ended
            _add(engine, next_number, WAITING_LANES, num_running)
            next_number += 1
    shares = (0.5, 0.99, 1.0)
    p50_ms, p99_ms, max_ms = (1000 * (percentile(host_s, share) or 0.0) for share in shares)
    return Figures(load, num_running, num_waiting, p50_ms, p99_ms, max_ms)


def make_engine(load: Load, num_running: int, num_steps: int) -> Engine:
    """Returns an engine with memory for the streams; under MEMORY for no more."""
    num_blocks = num_running * -(-_most_tokens(num_running, num_steps) // _BLOCK_SIZE)
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
    return build_engine(NoArithmetic(num_blocks), _VOCAB_SIZE, options)


def fill(engine: Engine, load: Load, num_running: int, num_waiting: int, num_steps: int) -> None:
    """Starts running sequences, then adds waiting ones."""
    for number in range(num_running):
        # Under TURNOVER they end one by one.
        num_output = _most_tokens(num_running, num_steps) - _PROMPT_TOKENS
        if load is Load.TURNOVER:
            num_output = _NUM_BEFORE + number
        _add(engine, number, RUNNING_LANES, num_output)
    while engine.step().num_decode_tokens < num_running:
        assert engine.has_work, "the first ended before the last began"
    for number in range(num_running, num_running + num_waiting):
        _add(engine, number, WAITING_LANES, num_running)


def _most_tokens(num_running: int, num_steps: int) -> int:
    """The number of tokens of one sequence, at its end."""
    return _PROMPT_TOKENS + _NUM_BEFORE + num_running + num_steps


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


def main(argv: Seq[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="timed for each row")
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING, metavar="N")
    parser.add_argument("--waiting", type=int, nargs="+", default=WAITING, metavar="N")
    parser.add_argument("--json", metavar="OUT")
    options = parser.parse_args(argv)
    found = [
        measure(load, num_running, num_waiting, options.steps)
        for load in Load
        for num_running in options.running
        for num_waiting in options.waiting
    ]
    rows = [["load", "running", "waiting", "p50 (ms)", "p99 (ms)", "max (ms)"]]
    for f in found:
        times = (f"{ms:.3f}" for ms in (f.p50_ms, f.p99_ms, f.max_ms))
        rows.append([f.load, f"{f.num_running:,}", f"{f.num_waiting:,}", *times])
    write([asdict(f) for f in found], markdown_table(rows), options.json)


if __name__ == "__main__":
    main()
