"""Times the engine against transformers' continuous batching, and its strategies under load."""

import random
import time
from dataclasses import dataclass
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from bench.gpu_check.machine import Machine
from bench.gpu_check.served import Served, closed_workload, random_prompts
from bench.gpu_check.shapes import Shape, random_decoder
from infra.bench.engine import run_workload
from infra.bench.workloads import Workload, WorkloadRequest
from infra.tables import percentile
from workers.ipc.messages import StrategyName

STRATEGIES: tuple[StrategyName, ...] = ("static", "dynamic", "continuous")


@dataclass(frozen=True, slots=True)
class Closed:
    """Output tokens per second of one workload, all requests at once."""

    num_requests: int
    ours: float
    transformers: float | None  # None if it did not run
    reason: str = ""


def time_ours(served: Served, num_requests: int, context: int, num_output: int) -> float:
    """Output tokens per second; the second of two runs."""
    workload = closed_workload(served, num_requests, context, num_output)
    for _ in range(2):
        run = run_workload(served.engine(), workload)
    return run.output_tokens_per_s


def time_transformers(
    shape: Shape, machine: Machine, num_requests: int, context: int, num_output: int
) -> float:
    """The same workload with `generate_batch`; the second of two runs of one manager."""
    decoder = random_decoder(shape, machine.dtype, machine.device, "sdpa")
    prompts = random_prompts(num_requests, context, int(shape.numbers["vocab_size"]))
    config_class: Any = GenerationConfig
    config = config_class(
        max_new_tokens=num_output, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    arguments: dict[str, Any] = {
        "inputs": [list(prompt) for prompt in prompts],
        "generation_config": config,
        "progress_bar": False,
        "persistent_manager": True,
    }
    if machine.is_tiny:  # the default fills gigabytes of cache on a CPU
        small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
        arguments |= {"warmup": False, "continuous_batching_config": small}
    for _ in range(2):
        machine.wait()
        start_s = time.perf_counter()
        outputs = decoder.generate_batch(**arguments)
        wall_s = time.perf_counter() - start_s
    decoder.destroy_cached_continuous_batching_manager()
    return sum(len(output.generated_tokens) for output in outputs.values()) / wall_s


@dataclass(frozen=True, slots=True)
class Loaded:
    """One strategy at one arrival rate. Latencies in seconds from arrival to the last token."""

    strategy: str
    requests_per_s: float
    num_requests: int
    output_tokens_per_s: float
    p50_s: float | None
    p99_s: float | None


def time_strategies(
    served: Served, rates: tuple[float, ...], duration_s: float, seed: int = 0
) -> list[Loaded]:
    """Every strategy gets the same requests at the same times: Poisson arrivals, outputs
    log-uniform from 16 to 256 tokens."""
    _record_graphs(served)
    found = []
    for rate in rates:
        workload = _open_workload(served, rate, duration_s, seed)
        for strategy in STRATEGIES:
            run = run_workload(served.engine(strategy), workload)
            latencies_s = [timeline.e2e_s for timeline in run.timelines]
            found.append(
                Loaded(
                    strategy,
                    rate,
                    len(workload.requests),
                    run.output_tokens_per_s,
                    percentile(latencies_s, 0.5),
                    percentile(latencies_s, 0.99),
                )
            )
    return found


def _record_graphs(served: Served) -> None:
    """Records graphs for short contexts too, so that recording is not timed."""
    graphs = served.ahead.decoder.graphs
    assert graphs is not None
    workload = closed_workload(served, 1, _prompt_tokens(served), graphs.num_sizes + 4)
    run_workload(served.engine(), workload)


def _prompt_tokens(served: Served) -> int:
    return 10 if served.machine.is_tiny else 256


def _open_workload(served: Served, rate: float, duration_s: float, seed: int) -> Workload:
    generator = random.Random(seed)
    least, most = (2, 6) if served.machine.is_tiny else (16, 256)
    arrivals_s: list[float] = []
    now_s = generator.expovariate(rate)
    while now_s < duration_s or not arrivals_s:
        arrivals_s.append(now_s)
        now_s += generator.expovariate(rate)
    prompts = random_prompts(len(arrivals_s), _prompt_tokens(served), served.vocab_size)
    lengths = [round(least * (most / least) ** generator.random()) for _ in arrivals_s]
    return Workload(
        tuple(
            WorkloadRequest(prompt, length, arrival_s)
            for prompt, length, arrival_s in zip(prompts, lengths, arrivals_s, strict=True)
        )
    )
