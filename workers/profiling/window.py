"""Runs an engine in steps of each class: timed, then under torch's profiler.

Prefill: prompts with one output token each. Decode: streams only. Mixed: streams, and a new prompt
in each step. Every prompt is different, so no prefix is cached.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from contract.jobs import SamplingParams
from workers.engine.engine import Engine
from workers.engine.interface import Chunk, Padding, Row
from workers.engine.masks import StepMasks
from workers.engine.report import StepReport
from workers.ipc.messages import Request
from workers.model.native.kernels import Kernels
from workers.model.runner import ModelRunner
from workers.profiling.demand import Demand, Shape, demand_of
from workers.profiling.findings import ClassFinding, Operator
from workers.profiling.machine import Machine, synchronize

KINDS = ("decode", "mixed", "prefill")
_MAX_OPERATORS = 8
_NATIVE = ("attend", "rms_norm", "rotate_and_keep", "silu_gate")  # kernels that torch cannot name


class Watched:
    """A model wrapper that records each step's time and demand."""

    def __init__(self, runner: ModelRunner, shape: Shape, device: torch.device) -> None:
        self._runner = runner
        self._shape = shape
        self._device = device
        self.model_s = 0.0
        self.demand = Demand(0, 0)
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.max_model_len, self.eos_token_ids = runner.max_model_len, runner.eos_token_ids
        self.shares_blocks, self.runs_ahead = runner.shares_blocks, runner.runs_ahead

    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: StepMasks | None = None
    ) -> Seq[Row]:
        self.demand = demand_of(self._shape, chunks)
        started_s = time.perf_counter()
        rows = self._runner.run(chunks, padding, masks)
        synchronize(self._device)
        self.model_s = time.perf_counter() - started_s
        return rows


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of the steps."""

    num_streams: int
    num_prompt_tokens: int
    num_steps: int  # of each class

    @property
    def num_output_tokens(self) -> int:
        """The output that a stream needs to last for all windows."""
        return 6 * self.num_steps + 64


@dataclass(slots=True)
class _Steps:
    """Records of the steps of one class."""

    step_s: list[float] = field(default_factory=list)
    model_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_seqs: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)


class Windows:
    """Produces steps of a class, with one engine for all."""

    def __init__(self, engine: Engine, model: Watched, vocab_size: int, load: Load) -> None:
        self._engine = engine
        self._model = model
        self._vocab_size = vocab_size
        self._load = load
        self._budget = engine.limits.max_num_batched_tokens
        self._num_requests = 0

    def run(
        self,
        kind: str,
        num_steps: int,
        within: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> _Steps:
        """Runs `num_steps` steps of this class. Enters the context `within` when they begin."""
        steps = _Steps()
        self._prepare(kind)
        with within():
            while len(steps.step_s) < num_steps:
                self._feed(kind)
                self._step(kind, steps)
        self._clear()
        return steps

    def _step(self, kind: str, steps: _Steps) -> None:
        """Runs one step; records it if it is of this class, as nearly all are."""
        started_s = time.perf_counter()
        report = self._engine.step()
        step_s = time.perf_counter() - started_s
        assert not report.failed, report.failed[0].message
        if kind_of(report) == kind:
            steps.step_s.append(step_s)
            steps.model_s.append(self._model.model_s)
            steps.num_tokens.append(report.num_step_tokens)
            steps.num_seqs.append(report.num_step_seqs)
            steps.num_bytes.append(self._model.demand.num_bytes)
            steps.flops.append(self._model.demand.flops)

    def _prepare(self, kind: str) -> None:
        """Adds the streams and runs them to their first tokens."""
        if kind == "prefill":
            return
        num_first = 0
        for _ in range(self._load.num_streams):
            self._add(self._load.num_output_tokens)
        while num_first < self._load.num_streams:
            report = self._engine.step()
            num_first += sum(output.position == 0 for output in report.outputs)

    def _feed(self, kind: str) -> None:
        """Adds the prompts of a step: none, one, or as many as its budget holds."""
        num = {"decode": 0, "mixed": 1}.get(kind, -(-self._budget // self._load.num_prompt_tokens))
        for _ in range(num):
            self._add(1)

    def _add(self, max_tokens: int) -> None:
        number = self._num_requests
        self._num_requests += 1
        span = range(self._load.num_prompt_tokens)
        prompt_ids = tuple(4 + (7919 * number + 31 * i) % (self._vocab_size - 4) for i in span)
        params = SamplingParams(
            max_tokens=max_tokens, seed=number, temperature=0.0, ignore_eos=True
        )
        self._engine.add(
            Request(
                job_id=str(number),
                epoch=1,
                tenant=str(number),  # so that no prefix is shared
                lane="standard",
                prompts=(prompt_ids,),
                params=params,
                outputs=((),),
                finished=(False,),
            )
        )

    def _clear(self) -> None:
        for number in range(self._num_requests):
            self._engine.stop_job(str(number), 1)


def kind_of(report: StepReport) -> str:
    """The class of a step, as in metrics."""
    num_prefill = report.num_step_tokens - report.num_decode_tokens
    if not num_prefill:
        return "decode" if report.num_decode_tokens else "idle"
    return "mixed" if report.num_decode_tokens else "prefill"


def find(
    windows: Windows,
    kind: str,
    machine: Machine,
    num_steps: int,
    num_profiled: int,
    trace_dir: Path | None,
) -> ClassFinding:
    """Times a class without the profiler, then profiles some of its steps."""
    windows.run(kind, 2)  # one-time costs are not measured
    steps = windows.run(kind, num_steps)
    operators, gap_share = _look_inside(windows, kind, num_profiled, trace_dir)
    step_s, model_s = statistics.mean(steps.step_s), statistics.mean(steps.model_s)
    return ClassFinding(
        kind=kind,
        num_steps=num_steps,
        num_tokens=statistics.mean(steps.num_tokens),
        num_seqs=statistics.mean(steps.num_seqs),
        step_s=step_s,
        p99_s=sorted(steps.step_s)[int(0.99 * (num_steps - 1))],
        model_s=model_s,
        outside_s=step_s - model_s,
        memory_s=statistics.mean(steps.num_bytes) / machine.bytes_per_s,
        compute_s=statistics.mean(steps.flops) / machine.flops_per_s,
        gap_share=gap_share,
        operators=operators,
    )


def _look_inside(
    windows: Windows, kind: str, num_steps: int, trace_dir: Path | None
) -> tuple[tuple[Operator, ...], float]:
    """The operators with the most time, and the share of time in which none ran."""
    is_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    profiler = profile(activities=activities)
    with named_native_kernels():
        windows.run(kind, num_steps, lambda: profiler)
    if trace_dir is not None:
        trace_dir.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace_dir / f"{kind}.json"))
    rows = [(_self_us(row, is_gpu), row) for row in profiler.key_averages()]
    all_us = sum(us for us, _ in rows)
    rows.sort(key=lambda pair: -pair[0])
    operators = tuple(
        Operator(row.key, us, us / all_us, row.count) for us, row in rows[:_MAX_OPERATORS] if us
    )
    return operators, max(0.0, 1.0 - all_us / 1e6 / _window_s(profiler))


def _self_us(row: Any, is_gpu: bool) -> float:
    """An operation's time; on a GPU of kernels only, because host operators include it again."""
    if is_gpu:
        return float(row.self_device_time_total) if row.device_type == DeviceType.CUDA else 0.0
    return float(row.self_cpu_time_total)


def _window_s(profiler: Any) -> float:
    events = profiler.events()
    start_us = min(event.time_range.start for event in events)
    return float(max(event.time_range.end for event in events) - start_us) / 1e6


@contextlib.contextmanager
def named_native_kernels() -> Iterator[None]:
    """Shows batchway's kernels in torch's profiler, which records only torch's operators."""
    originals = {name: getattr(Kernels, name) for name in _NATIVE}
    for name, original in originals.items():
        setattr(Kernels, name, _recorded(f"batchway::{name}", original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Kernels, name, original)


def _recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return call(*args, **kwargs)

    return recorded
