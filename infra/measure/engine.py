"""`batchway bench engine`: a workload on an engine in this process, without Redis and HTTP.

The loop is the engine process's: add arrivals, run a step, record its output.
"""

import argparse
import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from contract.jobs import SamplingParams
from infra.measure.workloads import BadWorkload, Workload, WorkloadRequest, read_workload
from infra.tables import progress_line, spread, table, write
from workers.engine.engine import Engine
from workers.engine.interface import ModelRefused
from workers.engine.sequence import RequestRefused
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions, Request, StrategyOptions

_TENANT, _LANE = "bench", "standard"
_NUM_WARM_UP = 4  # requests


@dataclass(slots=True)
class Timeline:
    """The tokens of a request and their times, in seconds from the start of the run."""

    arrival_s: float
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.times_s[0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.times_s[-1] - self.arrival_s

    @property
    def itls_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class EngineRun:
    """The results of a run; one timeline per request, in the workload's order."""

    wall_s: float
    timelines: tuple[Timeline, ...]
    num_steps: int
    model_s: float  # part of wall_s spent in the model
    peak_rss_bytes: int

    @property
    def num_output_tokens(self) -> int:
        return sum(len(timeline.token_ids) for timeline in self.timelines)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s


class RequestFailed(RuntimeError):
    """The engine could not run a request of the workload."""


def run_workload(
    engine: Engine,
    workload: Workload,
    *,
    clock_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    progress: Callable[[int, int], None] = lambda num_done, num_all: None,
) -> EngineRun:
    """Runs the workload to its end; `clock_s` is the engine's clock. Raises RequestFailed,
    RequestRefused."""
    timelines = tuple(Timeline(request.arrival_s) for request in workload.requests)
    coming = sorted(range(len(timelines)), key=lambda i: workload.requests[i].arrival_s)
    coming.reverse()
    num_all, num_done, num_steps, model_s = workload.num_output_tokens, 0, 0, 0.0
    start_s = clock_s()
    while coming or engine.has_work:
        now_s = clock_s() - start_s
        while coming and workload.requests[coming[-1]].arrival_s <= now_s:
            number = coming.pop()
            engine.add(make_request(number, workload.requests[number]))
        next_s = workload.requests[coming[-1]].arrival_s + start_s if coming else math.inf
        wake_s = engine.next_wake_s()
        rest_s = min(next_s, math.inf if wake_s is None else wake_s) - clock_s()
        if rest_s > 0:  # idle: waiting for a batch to fill or for the next arrival
            sleep(rest_s)
            continue
        report = engine.step()
        if report.failed:
            raise RequestFailed(report.failed[0].message)
        now_s = clock_s() - start_s
        for output in report.outputs:
            timeline = timelines[int(output.job_id)]
            timeline.token_ids.append(output.token_id)
            timeline.times_s.append(now_s)
        num_done += len(report.outputs)
        num_steps += 1
        model_s += report.step_s
        progress(num_done, num_all)
    return EngineRun(clock_s() - start_s, timelines, num_steps, model_s, peak_rss_bytes())


def warm_up(engine: Engine, workload: Workload, vocab_size: int) -> None:
    """Runs other requests, as long as the workload's first ones, to exclude one-time costs."""
    lengths = [len(request.prompt_token_ids) for request in workload.requests[:_NUM_WARM_UP]]
    requests = [
        WorkloadRequest(tuple(4 + (7919 * (i + 31 * n)) % (vocab_size - 4) for i in range(n)), 4)
        for n in lengths
    ]
    run_workload(engine, Workload(tuple(requests)))
    engine.evict_cache()


def peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def make_request(number: int, drawn: WorkloadRequest) -> Request:
    """A greedy request of the workload; its id is its number."""
    return Request(
        job_id=str(number),
        epoch=1,
        tenant=_TENANT,
        lane=_LANE,
        prompts=(drawn.prompt_token_ids,),
        params=SamplingParams(
            max_tokens=drawn.max_tokens, seed=number, temperature=0.0, ignore_eos=True
        ),
        outputs=((),),
        finished=(False,),
    )


def run(options: argparse.Namespace) -> int:
    from workers.model.loader import load_model  # imports torch, which a simulation does not need

    try:
        workload = read_workload(options.workload)
        engine_options = EngineOptions(
            model_path=options.model,
            dtype=options.dtype,
            quantization=options.quantization,
            max_num_seqs=options.max_running,
            max_num_batched_tokens=options.max_batched_tokens,
            kv_high_water=1.0,
            strategy=StrategyOptions(name=options.strategy, batch_size=options.max_running),
            num_threads=options.threads,
            fused=not options.torch_only,
        )
        loaded = load_model(engine_options, lambda text: print(text, file=sys.stderr))
        engine = build_engine(
            loaded.model, loaded.vocab_size, engine_options, loaded.num_step_tokens
        )
        warm_up(engine, workload, loaded.vocab_size)
        summary = summarise(run_workload(engine, workload, progress=progress_line("tokens")))
    except (BadWorkload, ModelRefused, RequestFailed, RequestRefused) as exc:
        print(f"batchway bench engine: {exc}", file=sys.stderr)
        return 1
    write(summary, tables(summary), options.json)
    return 0


def summarise(run: EngineRun) -> dict[str, Any]:
    """Seconds, tokens per second, bytes; `outputs` are the token ids of each request."""
    return {
        "output_tokens_per_s": run.output_tokens_per_s,
        "wall_s": run.wall_s,
        "num_output_tokens": run.num_output_tokens,
        "num_steps": run.num_steps,
        "model_s": run.model_s,
        "ttft_s": spread([timeline.ttft_s for timeline in run.timelines]),
        "itl_s": spread([itl for timeline in run.timelines for itl in timeline.itls_s]),
        "e2e_s": spread([timeline.e2e_s for timeline in run.timelines]),
        "peak_rss_bytes": run.peak_rss_bytes,
        "outputs": [timeline.token_ids for timeline in run.timelines],
    }


def tables(summary: dict[str, Any]) -> str:
    """Returns separate tables of throughput and of latencies in milliseconds."""
    rows = [
        ("output tokens/s", f"{summary['output_tokens_per_s']:.1f}"),
        ("output tokens", str(summary["num_output_tokens"])),
        ("wall time, s", f"{summary['wall_s']:.2f}"),
        ("share in the model", f"{summary['model_s'] / summary['wall_s']:.1%}"),
        ("steps", str(summary["num_steps"])),
        ("peak memory, MiB", f"{summary['peak_rss_bytes'] / 2**20:.0f}"),
    ]
    latencies = [["latency, ms", "p50", "p99", "max"]]
    names = {"ttft_s": "first token", "itl_s": "between tokens", "e2e_s": "whole answer"}
    for key, name in names.items():
        cells = [summary[key][column] for column in ("p50", "p99", "max")]
        latencies.append([name, *("-" if c is None else f"{c * 1000:.1f}" for c in cells)])
    return f"{table(rows)}\n\n{table(latencies)}"
