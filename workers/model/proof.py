"""Compares a model whose modules have been replaced with the original.

Runs the same steps before and after: prompts together, a chunk beside a stream, several streams,
one stream alone.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from workers.engine.interface import Chunk, ModelRefused
from workers.model.attention.interface import CannotShareBatch
from workers.model.checkpoint import first_line
from workers.model.fusion.exchange import Calls, noting_calls
from workers.model.fusion.stack import stack_of
from workers.model.probe import centred, probe_ids, probe_sequences
from workers.model.runner import ModelRunner

# Largest difference of a logit as a share of its row's largest, row mean removed. It was 0.14 for
# 64 layers with random weights in bfloat16.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
# Largest relative change of all logits' norm; catches a factor that half precision's tolerance
# passes.
_MAX_GROWTH = 0.01
# Tokens of each stream in all steps. None needs more than the 16 slots the loader guarantees; a
# smaller cache drops the last streams.
_STREAM_TOKENS = (12, 5, 3, 4)
_MOST_STREAM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Untouched:
    """The original model's results: logits (num_rows, vocab_size) float32; choices: see
    Choices.
    """

    steps: Seq[Seq[Chunk]]
    calls: Calls
    logits: Tensor
    choices: Seq[Tensor]


@torch.inference_mode()
def record(
    runner: ModelRunner, decoder: Any, config: PretrainedConfig, names: Collection[str]
) -> Untouched:
    """Runs the steps and records the calls of the named modules. Raises CannotShareBatch if the
    forward raises."""
    steps = _steps(runner, config, next(decoder.parameters()).device)
    try:
        with noting_calls(decoder, names) as calls, Choices() as choices:
            logits = _run(runner, steps)
    except ModelRefused:
        raise
    except Exception as exc:
        raise CannotShareBatch(
            f"{type(decoder).__name__} does not run in a paged batch: {first_line(exc)}"
        ) from exc
    return Untouched(steps, calls, logits, choices.made)


@torch.inference_mode()
def difference(runner: ModelRunner, decoder: Any, untouched: Untouched) -> str | None:
    """Runs the steps again; returns a description of the difference, or None."""
    try:
        with Choices(untouched.choices):
            found = _run(runner, untouched.steps)
    except Exception as exc:
        return f"its forward raises {type(exc).__name__}: {first_line(exc)}"
    reason = logits_difference(found, untouched.logits, decoder.dtype)
    return reason and f"its {reason}"


def logits_difference(found: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """Describes the difference of float32 logits (num_rows, vocab_size), computed in `dtype`; None
    if rounding explains it."""
    largest = centred(expected).abs().amax(-1)
    share = float(((found - expected).abs().amax(-1) / largest).max())
    growth = float(found.norm() / expected.norm()) - 1.0
    if share <= _TOLERANCE[dtype] and abs(growth) <= _MAX_GROWTH:
        return None
    return f"logits differ by up to {share:.2%} of the largest, and are {growth:+.2%} longer"


@torch.inference_mode()
def streamline(runner: ModelRunner, decoder: Any, untouched: Untouched) -> bool:
    """Replaces the decoder's forward by a stack if the results are equal; returns whether it
    did.
    """
    try:
        runner.stack = stack_of(decoder, runner.max_model_len, runner.cache)
    except Exception:  # a submodule has an unexpected type
        return False
    if runner.stack is not None and difference(runner, decoder, untouched) is not None:
        runner.stack = None
    return runner.stack is not None


class Choices(TorchFunctionMode):
    """Records a model's choices by `topk` and `max` (as mixtures choose experts), or repeats them.
    Otherwise rounding may swap two experts of nearly equal score, and a correct replacement would
    look wrong."""

    _FUNCTIONS = (torch.topk, Tensor.topk, torch.max, Tensor.max)

    def __init__(self, made: Seq[Tensor] | None = None) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self._to_repeat = None if made is None else iter(made)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in self._FUNCTIONS or not isinstance(found, tuple):
            return found
        if self._to_repeat is None:
            self.made.append(found[1])
            return found
        chosen = next(self._to_repeat, None)
        if chosen is None or chosen.shape != found[1].shape:
            return found
        return type(found)((_values_at(chosen, func, args, kwargs or {}), chosen))


def _values_at(chosen: Tensor, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The chosen entries of the tensor that `topk` or `max` was called with."""
    scores, *others = [*args] if args else [kwargs["input"]]
    place = 1 if func in (torch.topk, Tensor.topk) else 0  # position of `dim` in the arguments
    dim = others[place] if len(others) > place else kwargs.get("dim", -1)
    if chosen.ndim < scores.ndim:  # `max` without `keepdim`
        return _values_at(chosen.unsqueeze(dim), func, args, kwargs).squeeze(dim)
    values: Tensor = scores.gather(dim, chosen)
    return values


def _run(runner: ModelRunner, steps: Seq[Seq[Chunk]]) -> Tensor:
    """The logits (num_rows, vocab_size) of all steps."""
    return torch.cat([runner.logits(chunks).float() for chunks in steps])


def _steps(
    runner: ModelRunner, config: PretrainedConfig, device: torch.device
) -> list[list[Chunk]]:
    """The first stream's prompt has 9 tokens; the second's has 4, in two chunks."""
    num_streams = runner.num_blocks // -(-_MOST_STREAM_TOKENS // runner.block_size)
    tokens = [probe_ids(config, n, device) for n in _STREAM_TOKENS[:num_streams]]
    first, second, *others = probe_sequences(tokens, runner.block_size)
    short = [(each, each.num_prompt - 1) for each in others]
    return [
        [
            Chunk(first, 0, 9, samples=True),
            Chunk(second, 0, 2, samples=False),
            *(Chunk(each, 0, n, samples=True) for each, n in short),
        ],
        [Chunk(first, 9, 1, samples=True), Chunk(second, 2, 2, samples=True)],
        [
            Chunk(first, 10, 1, samples=True),
            Chunk(second, 4, 1, samples=True),
            *(Chunk(each, n, 1, samples=True) for each, n in short),
        ],
        [Chunk(first, 11, 1, samples=True)],
    ]
