"""The same weights in transformers: the reference of the engine's tokens, and its continuous
batching."""

import inspect
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

from bench.gpu_check.machine import Machine
from bench.gpu_check.results import Finding
from bench.gpu_check.served import random_prompts
from bench.gpu_check.shapes import Shape, random_decoder
from workers.model.sequential import kept_state

# A difference, in standard deviations of a row's logits, that another order of additions in float32
# does not explain on a tiny model.
_LEAST_TOLERANCE = 0.01


class Transformers:
    """A shape's decoder with torch's own attention."""

    def __init__(self, shape: Shape, machine: Machine) -> None:
        self._shape = shape
        self._machine = machine
        self._decoder = random_decoder(shape, machine.dtype, machine.device, "sdpa")

    @torch.inference_mode()
    def check(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Finding:
        """Checks that each greedy token of the engine is the best here, or behind it by no more
        than the difference of transformers' own logits when computed token by token. A token that
        is the best by other logits may be behind by the differences of two."""
        worst, num_best, num_all = 0.0, 0, 0
        tolerance = max(_LEAST_TOLERANCE, 2 * self._own_difference(prompts[0], outputs[0]))
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

    def _own_difference(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """Returns the largest difference of a logit between one forward and the engine's steps: the
        prompt, then each token with a cache."""
        whole, steps, state = self._logits(prompt, output), [], dict[str, Any]()
        names = inspect.signature(self._decoder.forward).parameters
        name = "cache" if "cache" in names else "past_key_values"  # from transformers 5.24 on
        for part in (prompt, *([token_id] for token_id in output[:-1])):
            ids = torch.tensor([list(part)], device=self._machine.device)
            found = self._decoder(input_ids=ids, use_cache=True, **state)
            state = {name: kept_state(found)}
            steps.append(found.logits[0, -1].float())
        difference = (whole - torch.stack(steps)).abs() / whole.std(-1, keepdim=True)
        return float(difference.max())

    def _logits(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """float32 (number of output tokens, vocab_size), by one forward."""
        known = torch.tensor([[*prompt, *output[:-1]]], device=self._machine.device)
        logits: Tensor = self._decoder(input_ids=known, use_cache=False).logits
        return logits[0, len(prompt) - 1 :].float()

    def tokens_per_s(self, sizes: tuple[int, int, int], seed: int) -> float:
        """Output tokens per second of `generate_batch`. `sizes`: requests, prompt tokens, output
        tokens. Raises RuntimeError if some are missing: its thread logs why."""
        num_requests, num_in, num_out = sizes
        prompts = random_prompts(num_requests, num_in, self._shape.vocab_size, seed)
        config_class: Any = GenerationConfig
        arguments: dict[str, Any] = {
            "inputs": [list(prompt) for prompt in prompts],
            "generation_config": config_class(
                max_new_tokens=num_out, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            "progress_bar": False,
            "persistent_manager": True,
        }
        if self._machine.is_tiny:  # the default fills gigabytes of cache on a CPU
            small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
            arguments |= {"warmup": False, "continuous_batching_config": small}
        self._machine.wait()
        start_s = time.perf_counter()
        outputs = self._decoder.generate_batch(**arguments)
        wall_s = time.perf_counter() - start_s
        num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
        if num_tokens != num_requests * num_out:
            raise RuntimeError(f"{num_tokens} of {num_requests * num_out} tokens were generated")
        return num_tokens / wall_s

    def close(self) -> None:
        self._decoder.destroy_cached_continuous_batching_manager()
