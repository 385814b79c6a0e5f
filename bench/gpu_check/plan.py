"""The order of checks and timings, most important first."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.gpu_check.checks import Check, check_engine, check_kernels, run_check
from bench.gpu_check.comparison import Closed, time_ours, time_strategies, time_transformers
from bench.gpu_check.machine import Machine, measure_roofs
from bench.gpu_check.report import Report
from bench.gpu_check.served import serve
from bench.gpu_check.shapes import (
    LLAMA2_7B,
    QWEN3_06B,
    QWEN3_8B,
    TINY_QWEN3,
    Shape,
)
from bench.gpu_check.timings import time_decoding, time_prefill

TIME_LIMIT_S = 540.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure."""

    shapes: tuple[Shape, ...]
    compared: Shape  # against transformers' continuous batching
    loaded: Shape  # under arrivals
    streams: tuple[int, ...]
    context: int
    num_steps: int
    num_prefill: int
    closed: tuple[int, int, int]  # requests, prompt tokens, output tokens
    rates: tuple[float, ...]  # requests per second
    duration_s: float  # of arrivals


FULL = Sizes(
    shapes=(QWEN3_8B, QWEN3_06B, LLAMA2_7B),
    compared=QWEN3_8B,
    loaded=LLAMA2_7B,
    streams=(256, 128, 32, 1),
    context=512,
    num_steps=48,
    num_prefill=8192,
    closed=(128, 512, 128),
    rates=(4.0, 16.0),
    duration_s=12.0,
)
SMALL = Sizes(
    shapes=(TINY_QWEN3,),
    compared=TINY_QWEN3,
    loaded=TINY_QWEN3,
    streams=(2, 1),
    context=10,
    num_steps=2,
    num_prefill=12,
    closed=(2, 8, 3),
    rates=(4.0,),
    duration_s=0.5,
)


class GpuCheck:
    """Runs the plan; reports what was skipped for lack of time."""

    def __init__(
        self,
        machine: Machine,
        sizes: Sizes,
        say: Callable[[str], None],
        clock_s: Callable[[], float] = time.monotonic,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self._machine = machine
        self._sizes = sizes
        self._say = say
        self._clock_s = clock_s
        self._end_s = clock_s() + time_limit_s

    def run(self) -> Report:
        self._say("measuring the device")
        report = Report(self._machine, measure_roofs(self._machine))
        self._say("checking kernels")
        report.checks += run_check("kernels", lambda: check_kernels(self._machine))
        for shape in self._sizes.shapes:
            if self._has_time(report, f"{shape.name}"):
                report.checks += run_check(shape.name, lambda s=shape: self._serve(report, s))  # type: ignore[misc]
                self._release()
        if self._has_time(report, "transformers' continuous batching"):
            self._compare(report)
        return report

    def _serve(self, report: Report, shape: Shape) -> list[Check]:
        """Measures a shape and returns its checks."""
        sizes, name = self._sizes, shape.name
        served = serve(shape, self._machine, lambda text: self._say(f"{name}: {text}"))
        checks = [check_engine(served)]
        self._say(f"{name}: timing")
        report.decoding[name] = [
            time_decoding(served, report.roofs, n, sizes.context, sizes.num_steps)
            for n in sizes.streams
        ]
        report.prefill[name] = time_prefill(served, report.roofs, sizes.num_prefill)
        if shape is sizes.compared:
            report.closed[name] = Closed(sizes.closed[0], time_ours(served, *sizes.closed), None)
        if shape is sizes.loaded and self._has_time(report, "strategies under load"):
            report.loaded[name] = time_strategies(served, sizes.rates, sizes.duration_s)
        return checks

    def _compare(self, report: Report) -> None:
        """transformers gets the device alone: two such models do not fit."""
        shape, sizes = self._sizes.compared, self._sizes
        if shape.name not in report.closed:
            return
        ours = report.closed[shape.name].ours
        self._say(f"{shape.name}: transformers' continuous batching")
        try:
            theirs = time_transformers(shape, self._machine, *sizes.closed)
        except Exception as exc:  # our engine's figure stays valid
            report.closed[shape.name] = Closed(sizes.closed[0], ours, None, type(exc).__name__)
        else:
            report.closed[shape.name] = Closed(sizes.closed[0], ours, theirs)
        self._release()

    def _has_time(self, report: Report, what: str) -> bool:
        if self._clock_s() < self._end_s:
            return True
        report.skipped.append(f"{what}: the time limit was reached")
        return False

    def _release(self) -> None:
        """Frees the memory of a finished shape."""
        gc.collect()
        if self._machine.device.type == "cuda":
            torch.cuda.empty_cache()
