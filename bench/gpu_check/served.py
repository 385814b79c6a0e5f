"""A decoder of random weights behind the engine, as in a worker; and its workloads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_check.machine import Machine
from bench.gpu_check.shapes import Shape, random_decoder, weight_bytes
from infra.bench.workloads import Workload, WorkloadRequest
from workers.engine.engine import Engine
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions, StrategyName, StrategyOptions
from workers.model.attention.triton_attention import TritonAttention
from workers.model.gpu.ahead_runner import AheadRunner
from workers.model.gpu.graphs import Compute, Graph, Record, recorder
from workers.model.loader import wrap_decoder
from workers.model.runner import ModelRunner

MAX_STREAMS = 256
_KV_SHARE = 0.8  # of the memory left beside the weights


class _Replayed:
    """Replaces a CUDA graph on a CPU: calls the recorded function."""

    def __init__(self, compute: Compute) -> None:
        self.replay = compute


def make_recorder(machine: Machine) -> Record:
    """Records CUDA graphs, or their replacement without a GPU."""
    if machine.device.type == "cuda":
        found = recorder("graphs")
        assert found is not None
        return found

    def record(compute: Compute) -> Graph:
        return _Replayed(compute)

    return record


@dataclass(slots=True)
class Served:
    """A prepared shape: its decoder with our kernels, and a runner."""

    shape: Shape
    machine: Machine
    runner: ModelRunner
    ahead: AheadRunner
    num_weight_bytes: int
    num_parameters: int  # multiplied for each token
    kv_bytes_per_token: int
    max_streams: int

    @property
    def vocab_size(self) -> int:
        return int(self.shape.numbers["vocab_size"])

    def engine(self, strategy: StrategyName = "continuous", num_streams: int = 0) -> Engine:
        """A new engine over the runner, with one step in flight."""
        num_streams = num_streams or self.max_streams
        options = EngineOptions(
            model_path="",
            max_num_seqs=num_streams,
            max_num_batched_tokens=self.machine.num_batched_tokens,
            kv_high_water=1.0,
            prefix_caching=False,
            steps="ahead",
            strategy=StrategyOptions(name=strategy, batch_size=min(32, num_streams)),
        )
        return build_engine(self.ahead, self.vocab_size, options)


def serve(shape: Shape, machine: Machine, say: Callable[[str], None]) -> Served:
    """Creates and prepares the decoder as the loader does. Raises ModelRefused."""
    sizes: list[int] = []

    def read() -> Any:
        decoder = random_decoder(shape, machine.dtype, machine.device)
        sizes.append(weight_bytes(decoder))
        return decoder

    streams = 4 if machine.is_tiny else MAX_STREAMS
    options = EngineOptions(
        model_path="",
        device=machine.device.type,
        attention="triton",
        kv_memory_bytes=int(machine.free_bytes() * _KV_SHARE),
        max_num_seqs=streams,
        max_num_batched_tokens=machine.num_batched_tokens,
    )
    length = 64 if machine.is_tiny else 4096
    runner = wrap_decoder(
        read, shape.config(), machine.device, machine.dtype, options, say, max_model_len=length
    )
    num_bytes = sizes[-1]
    num_parameters = num_bytes // machine.dtype.itemsize
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.backend, TritonAttention)
    cache = runner.cache
    ahead = AheadRunner(
        runner, runner.backend.prepare_rows, streams, machine.device, make_recorder(machine)
    )
    num_slots = (cache.num_blocks + 1) * cache.block_size
    kv_bytes = cache.num_bytes // num_slots
    return Served(shape, machine, runner, ahead, num_bytes, num_parameters, kv_bytes, streams)


def random_prompts(num_prompts: int, num_tokens: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts of one length, the same at every call."""
    generator = torch.Generator().manual_seed(num_prompts)
    ids = torch.randint(4, vocab_size, (num_prompts, num_tokens), generator=generator)
    return [tuple(row) for row in ids.tolist()]


def closed_workload(served: Served, num_streams: int, context: int, num_output: int) -> Workload:
    prompts = random_prompts(num_streams, context, served.vocab_size)
    return Workload(tuple(WorkloadRequest(prompt, num_output) for prompt in prompts))
