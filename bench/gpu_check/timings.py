"""Times decoding and prefill of a shape, relative to the device's measured limits."""

import time
from dataclasses import dataclass

import torch

from bench.gpu_check.machine import Roofs
from bench.gpu_check.served import Served, closed_workload
from infra.bench.engine import make_request, run_workload


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decoding streams. Shares are of the measured limits; None: their KV does not fit."""

    num_streams: int
    step_s: float | None
    tokens_per_s: float | None
    bandwidth_share: float | None
    flops_share: float | None
    host_gap_share: float | None  # share of the step in which the device waits for the host


@dataclass(frozen=True, slots=True)
class Prefill:
    num_tokens: int
    tokens_per_s: float
    flops_share: float


def time_decoding(
    served: Served, roofs: Roofs, num_streams: int, context: int, num_steps: int
) -> Decoding:
    """Through the engine, from prompts of `context` tokens; the first steps are not counted."""
    graphs = served.ahead.decoder.graphs
    num_warm_up = 4 + (0 if graphs is None else graphs.num_sizes)  # one step records each graph
    # The first streams decode while the others' prompts are computed.
    num_prompt_steps = 4 + 2 * (num_streams * context // served.machine.num_batched_tokens)
    length = context + num_prompt_steps + num_warm_up + num_steps
    runner = served.runner
    if num_streams * (length + runner.block_size) > runner.num_blocks * runner.block_size:
        return Decoding(num_streams, None, None, None, None, None)
    engine = served.engine(num_streams=num_streams)
    workload = closed_workload(served, num_streams, context, length - context)
    for number, request in enumerate(workload.requests):
        engine.add(make_request(number, request))
    while engine.step().num_decode_tokens < num_streams:
        assert engine.has_work, "the first streams ended before the last one began"
    for _ in range(num_warm_up):
        engine.step()
    served.machine.wait()
    start_s = time.perf_counter()
    for _ in range(num_steps):
        report = engine.step()
        assert report.num_decode_tokens == num_streams
    step_s = (time.perf_counter() - start_s) / num_steps
    device_s = _device_step_s(served, num_streams, length)
    for number in range(num_streams):
        engine.stop_job(str(number), 1)
    kv_bytes = num_streams * context * served.kv_bytes_per_token
    return Decoding(
        num_streams,
        step_s,
        num_streams / step_s,
        (served.num_weight_bytes + kv_bytes) / step_s / roofs.bytes_per_s,
        2 * served.num_parameters * num_streams / step_s / roofs.flops,
        max(0.0, 1 - device_s / step_s),
    )


@torch.inference_mode()
def _device_step_s(served: Served, num_streams: int, longest: int) -> float:
    """The device's part of the step, repeated without the host's bookkeeping. It rewrites the KV of
    the last step's rows, which is no longer needed."""
    decoder = served.ahead.decoder
    return served.machine.seconds(lambda: decoder.logits(num_streams, longest).argmax(-1))


def time_prefill(served: Served, roofs: Roofs, num_tokens: int) -> Prefill:
    """Prompts of `num_tokens` tokens together in one step; the median of three."""
    context = min(num_tokens, 2048, served.runner.max_model_len - 2)
    num_prompts = max(1, num_tokens // context)
    engine = served.engine(num_streams=num_prompts)
    workload = closed_workload(served, num_prompts, context, 1)
    walls_s = []
    for _ in range(4):
        served.machine.wait()
        walls_s.append(run_workload(engine, workload).wall_s)
    wall_s = sorted(walls_s[1:])[1]
    total = num_prompts * context
    # The head computes only the last row of each prompt; its small share is included.
    return Prefill(total, total / wall_s, 2 * served.num_parameters * total / wall_s / roofs.flops)
