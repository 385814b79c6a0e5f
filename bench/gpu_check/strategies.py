"""Times the strategies on one workload, all requests at once."""

from typing import Any

from bench.gpu_check.served import Served
from bench.gpu_check.sizes import Sizes
from infra.measure.engine import run_workload
from infra.measure.workloads import log_uniform_workload
from infra.tables import spread
from workers.ipc.messages import StrategyName, StrategyOptions

STRATEGIES: tuple[StrategyName, ...] = ("continuous", "dynamic", "static")


def time_strategy(served: Served, sizes: Sizes, name: StrategyName, seed: int) -> dict[str, Any]:
    """Returns output tokens per second, and seconds to the first and the last token. Static and
    dynamic batches are padded, as is common."""
    workload = log_uniform_workload(
        sizes.num_requests,
        served.shape.vocab_size,
        prompt_tokens=sizes.lengths,
        output_tokens=sizes.lengths,
        seed=seed,
    )
    options = StrategyOptions(name=name, batch_size=sizes.batch_size, padded=name != "continuous")
    run = run_workload(served.engine(options), workload)
    return {
        "tokens_per_s": run.output_tokens_per_s,
        "num_steps": run.num_steps,
        "first_token_s": spread([timeline.ttft_s for timeline in run.timelines]),
        "whole_s": spread([timeline.e2e_s for timeline in run.timelines]),
    }
