"""Holds the own engine, whole and in this process, against transformers with the same weights."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from bench.gpu_check.machine import Machine
from bench.gpu_check.model import SHAPES, TINY, random_decoder
from bench.gpu_check.record import Finding
from infra.measure.engine import run_workload
from infra.measure.workloads import log_uniform_workload
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions
from workers.model.ahead.runner import AheadRunner
from workers.model.gpu.graphs import sizes_up_to
from workers.model.loader import wrap_decoder

_NUM_LAYERS = 4  # of the widths of Qwen3-8B
_KV_BYTES = 2**30
# How far the engine's token may be behind, in standard deviations of a row's logits. In bfloat16
# transformers differed from itself by 0.15 over 36 layers, where it computed token by token.
_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.3}


def check_engine(
    machine: Machine, say: Callable[[str], None], check: Callable[[str, Finding], None]
) -> None:
    """Loads some layers as a worker does, with its defaults for a GPU, and checks whether all
    graphs are recorded, and each greedy token. Raises ModelRefused."""
    shape, num_layers = (TINY, 2) if machine.is_tiny else (SHAPES[3], _NUM_LAYERS)
    config = shape.config(num_hidden_layers=num_layers)
    options = EngineOptions(model_path="", device=machine.device.type, kv_memory_bytes=_KV_BYTES)
    if not machine.is_cuda:  # what runs of it in Triton's interpreter
        small = {"kv_memory_bytes": 2**20, "max_num_seqs": 4, "max_num_batched_tokens": 64}
        options = msgspec.structs.replace(options, attention="triton", ahead=True, **small)
    model = wrap_decoder(
        lambda: random_decoder(config, machine),
        config,
        machine.device,
        machine.dtype,
        options,
        say,
        max_model_len=1024 if machine.is_tiny else 4096,
    )
    if machine.is_cuda:
        check("CUDA graphs", graphs_of(model, options.max_num_seqs))
    num_in, num_out = (9, 4) if machine.is_tiny else (512, 32)
    workload = log_uniform_workload(
        2 if machine.is_tiny else 4,
        shape.vocab_size,
        prompt_tokens=(num_in, num_in),
        output_tokens=(num_out, num_out),
    )
    run = run_workload(build_engine(model, shape.vocab_size, options), workload)
    reference = Reference(random_decoder(config, machine, "sdpa"))
    prompts = [request.prompt_token_ids for request in workload.requests]
    outputs = [timeline.token_ids for timeline in run.timelines]
    check("engine's tokens", reference.check(prompts, outputs))


def graphs_of(model: object, max_num_seqs: int) -> Finding:
    """Whether steps of every size are recorded: the loader goes on without graphs that fail."""
    if not isinstance(model, AheadRunner) or model.decoder.graphs is None:
        return Finding(False, "steps are not recorded; the log gives the reason")
    num_recorded, num_wanted = len(model.decoder.graphs.sizes), len(sizes_up_to(max_num_seqs))
    return Finding(num_recorded == num_wanted, f"{num_recorded} of {num_wanted} are recorded")


class Reference:
    """A decoder with torch's own attention."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    @torch.inference_mode()
    def check(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Finding:
        """Checks that each greedy token of the engine is the best here, or nearly."""
        worst, num_best, num_all = 0.0, 0, 0
        tolerance = _TOLERANCE[self._decoder.dtype]
        for prompt, output in zip(prompts, outputs, strict=True):
            rows = self._logits(prompt, output)
            chosen = rows.gather(1, torch.tensor(output, device=rows.device)[:, None])
            behind = (rows.max(-1, keepdim=True).values - chosen) / rows.std(-1, keepdim=True)
            worst = max(worst, float(behind.max()))
            num_best += int((behind == 0).sum())
            num_all += len(behind)
        detail = (
            f"{num_best} of {num_all} tokens the best, worst {worst:.3f} deviations behind, "
            f"at most {tolerance:.3f} allowed"
        )
        return Finding(worst <= tolerance, detail)

    def _logits(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """float32 (number of output tokens, vocab_size), by one forward."""
        known = torch.tensor([[*prompt, *output[:-1]]], device=self._decoder.device)
        logits: Tensor = self._decoder(input_ids=known, use_cache=False).logits
        return logits[0, len(prompt) - 1 :].float()
