"""Runs a workload through an engine in this process, without Redis and HTTP.

The loop is the engine process's: add arrivals, run a step, record its output.
"""

import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from contract.jobs import SamplingParams
from infra.measure.workloads import Workload, WorkloadRequest
from workers.engine.engine import Engine
from workers.ipc.messages import Request

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
