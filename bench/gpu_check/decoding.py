"""Times decoding and prefill of a shape by the default path."""

import statistics
import time
from typing import Any

import torch

from bench.gpu_check.results import Finding
from bench.gpu_check.served import Served, at_once, requests_of
from bench.gpu_check.sizes import Sizes
from infra.measure.engine import EngineRun, run_workload
from infra.tables import spread
from workers.engine.engine import Engine
from workers.ipc.jobs import Request
from workers.model.ahead.runner import AheadRunner
from workers.model.gpu.graphs import sizes_up_to

_NUM_WARM_UP = 8  # steps
_MOST_PROMPT_STEPS = 1000


def check_graphs(served: Served) -> Finding:
    """Whether steps of every size are recorded: the loader goes on without graphs that fail."""
    if not isinstance(served.model, AheadRunner) or served.model.decoder.graphs is None:
        return Finding(False, "steps are not recorded; the log gives the reason")
    num_recorded = len(served.model.decoder.graphs.sizes)
    num_wanted = len(sizes_up_to(served.options.max_num_seqs))
    return Finding(num_recorded == num_wanted, f"{num_recorded} of {num_wanted} are recorded")


def warm_up(served: Served, sizes: Sizes) -> float:
    """Runs one stream over the whole length and one of long prompts, to compile kernels that the
    loader has not compiled. Returns its seconds."""
    start_s = time.perf_counter()
    for wanted in ((1, sizes.num_in, sizes.num_out), (*sizes.prefill, 2)):
        run_workload(served.engine(), at_once(served.shape, wanted, seed=0))
    return time.perf_counter() - start_s


def time_streams(served: Served, sizes: Sizes, num_streams: int, seed: int) -> dict[str, Any]:
    """Times all requests at once, from the first prompt to the last token, in seconds. `decoding`
    is None if the streams did not all run together."""
    workload = at_once(served.shape, (num_streams, sizes.num_in, sizes.num_out), seed)
    run = run_workload(served.engine(), workload)
    return {
        "tokens_per_s": run.output_tokens_per_s,
        "wall_s": run.wall_s,
        "first_token_s": spread([timeline.ttft_s for timeline in run.timelines]),
        "between_tokens_s": spread([itl for t in run.timelines for itl in t.itls_s]),
        "decoding": _decoding(served, run, sizes.num_in),
    }


def _decoding(served: Served, run: EngineRun, num_in: int) -> dict[str, float] | None:
    """Returns the rates while every stream decodes. A step reads the weights once, and for each
    token the KV of all before it."""
    start_s = max(timeline.times_s[0] for timeline in run.timelines)
    end_s = min(timeline.times_s[-1] for timeline in run.timelines)
    if end_s <= start_s:
        return None
    context, num_tokens, times_s = 0, 0, set[float]()
    for timeline in run.timelines:
        within = [i for i, at_s in enumerate(timeline.times_s) if start_s < at_s <= end_s]
        context += sum(num_in + i for i in within)
        num_tokens += len(within)
        times_s.update(timeline.times_s[i] for i in within)
    kv_bytes = served.shape.kv_bytes_per_token(served.machine.dtype)
    num_bytes = len(times_s) * served.num_weight_bytes + context * kv_bytes
    wall_s = end_s - start_s
    return {
        "step_s": wall_s / len(times_s),
        "tokens_per_s": num_tokens / wall_s,
        "mean_context": context / num_tokens,
        "bytes_per_s": num_bytes / wall_s,
        "flops": 2 * served.num_parameters * num_tokens / wall_s,
    }


def time_prefill(served: Served, sizes: Sizes, seed: int) -> dict[str, float]:
    """Times prompts at once, one token each. Includes the head, of each prompt's last row alone."""
    num_prompts, num_tokens = sizes.prefill
    run = run_workload(served.engine(), at_once(served.shape, (num_prompts, num_tokens, 1), seed))
    tokens_per_s = num_prompts * num_tokens / run.wall_s
    return {"tokens_per_s": tokens_per_s, "flops": 2 * served.num_parameters * tokens_per_s}


def time_closed(served: Served, sizes: Sizes, seed: int) -> float:
    """Returns output tokens per second of the requests that transformers gets too."""
    return run_workload(
        served.engine(), at_once(served.shape, sizes.closed, seed)
    ).output_tokens_per_s


def time_host_gap(served: Served, sizes: Sizes, num_streams: int) -> dict[str, float]:
    """Returns the `share` of a step that is saved if the device repeats the model of that step by
    itself, without the host's bookkeeping and sampling. Raises RuntimeError without steps ahead."""
    if not isinstance(served.model, AheadRunner):
        raise RuntimeError("steps do not run ahead")
    decoder = served.model.decoder
    with steady(served, sizes, num_streams) as streams:
        steps_s = [streams.step_s(sizes.steady_steps) for _ in range(sizes.num_repeats)]
        positions = streams.positions
        with torch.inference_mode():
            # It writes the KV of the last step's rows again, which nobody reads any more.
            device_s = served.machine.seconds(
                lambda: decoder.logits(positions, num_streams).argmax(-1)
            )
    step_s = statistics.median(steps_s)
    return {"step_s": step_s, "device_s": device_s, "share": max(0.0, 1 - device_s / step_s)}


class Streams:
    """Requests in the middle of their output. A context manager: its end stops them."""

    def __init__(self, served: Served, engine: Engine, requests: list[Request]) -> None:
        self._machine = served.machine
        self._engine = engine
        self._requests = requests

    @property
    def positions(self) -> list[int]:
        """The positions of the tokens in flight."""
        return [sequence.num_known for sequence in self._engine.sequences]

    def run(self, num_steps: int) -> None:
        """Runs steps. Raises RuntimeError if not every stream gets a token in each step."""
        for _ in range(num_steps):
            if self._engine.step().num_decode_tokens != len(self._requests):
                raise RuntimeError("a stream ended or waited")

    def step_s(self, num_steps: int) -> float:
        """Seconds per step."""
        self._machine.wait()
        start_s = time.perf_counter()
        self.run(num_steps)
        return (time.perf_counter() - start_s) / num_steps

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *_: object) -> None:
        for request in self._requests:
            self._engine.stop_job(request.job_id, request.epoch)


def steady(
    served: Served, sizes: Sizes, num_streams: int, *, one: bool = False, **sampling: Any
) -> Streams:
    """Starts streams, until each decodes. `sampling`: their parameters; with `one`, those of the
    first alone. Raises RuntimeError if they do not run together."""
    num_steps = _NUM_WARM_UP + sizes.steady_steps * (sizes.num_repeats + 1)
    wanted = (num_streams, sizes.num_in, 4 * num_streams + num_steps)
    workload = at_once(served.shape, wanted, seed=0)
    requests = requests_of(workload, **sampling)
    if one:
        requests = [requests[0], *requests_of(workload)[1:]]
    engine = served.engine()
    for request in requests:
        engine.add(request)
    for _ in range(_MOST_PROMPT_STEPS):
        if engine.step().num_decode_tokens == num_streams:
            break
    else:
        raise RuntimeError(f"{num_streams} streams do not run together")
    streams = Streams(served, engine, requests)
    streams.run(_NUM_WARM_UP)
    return streams
