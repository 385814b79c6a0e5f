"""A decoder of random weights behind the engine, by the loader's default path; and its requests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from bench.gpu_check.machine import Machine
from bench.gpu_check.shapes import Shape, random_decoder, weight_bytes
from infra.measure.engine import make_request
from infra.measure.workloads import Workload, WorkloadRequest
from workers.engine.engine import Engine
from workers.engine.interface import Model
from workers.engine_process.engine_setup import build_engine
from workers.ipc.jobs import Request
from workers.ipc.messages import EngineOptions, StrategyOptions
from workers.model.checkpoint import context_length
from workers.model.loader import wrap_decoder


@dataclass(frozen=True, slots=True)
class Served:
    """A prepared shape: its model as a worker has it."""

    shape: Shape
    machine: Machine
    model: Model
    options: EngineOptions
    num_weight_bytes: int  # read in each step

    @property
    def num_parameters(self) -> int:
        """The number of parameters that are multiplied for each token."""
        return self.num_weight_bytes // self.machine.dtype.itemsize

    def engine(self, strategy: StrategyOptions | None = None) -> Engine:
        """A new engine, whose prefix cache is empty."""
        options = self.options
        if strategy is not None:
            options = msgspec.structs.replace(options, strategy=strategy)
        return build_engine(self.model, self.shape.vocab_size, options)


def serve(shape: Shape, machine: Machine, say: Callable[[str], None]) -> Served:
    """Creates and prepares the decoder as the loader does, with the default options; on a CPU with
    those for a GPU, as far as they run there. Raises ModelRefused."""
    sizes: list[int] = []

    def read() -> Any:
        decoder = random_decoder(shape, machine.dtype, machine.device)
        sizes.append(weight_bytes(decoder))
        return decoder

    options = EngineOptions(model_path="", device=machine.device.type)
    if machine.device.type == "cpu":
        small = {"kv_memory_bytes": 2**20, "max_num_seqs": 4, "max_num_batched_tokens": 64}
        options = msgspec.structs.replace(options, attention="triton", steps="ahead", **small)
    config = shape.config()
    length = context_length(config)
    assert length is not None
    model = wrap_decoder(
        read, config, machine.device, machine.dtype, options, say, max_model_len=length
    )
    return Served(shape, machine, model, options, sizes[-1])


def random_prompts(
    num_prompts: int, num_tokens: int, vocab_size: int, seed: int
) -> list[tuple[int, ...]]:
    """Returns prompts of one length, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, vocab_size, (num_prompts, num_tokens), generator=generator)
    return [tuple(row) for row in ids.tolist()]


def at_once(shape: Shape, sizes: tuple[int, int, int], seed: int) -> Workload:
    """A workload without pauses. `sizes`: requests, prompt tokens, output tokens."""
    num_requests, num_in, num_out = sizes
    prompts = random_prompts(num_requests, num_in, shape.vocab_size, seed)
    return Workload(tuple(WorkloadRequest(prompt, num_out) for prompt in prompts))


def requests_of(workload: Workload, **sampling: Any) -> list[Request]:
    """Returns the workload's requests; `sampling` changes their parameters."""
    found = []
    for number, drawn in enumerate(workload.requests):
        request = make_request(number, drawn)
        params = msgspec.structs.replace(request.params, **sampling)
        found.append(msgspec.structs.replace(request, params=params))
    return found
