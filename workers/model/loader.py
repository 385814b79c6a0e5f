"""Turns a model folder or Hub name into a model that runs, or into one sentence why not.

Safetensors only, never code that comes with a model. Leaves the checks of the configuration to
`checkpoint`, reading to `weights`, and the checks of the running model to `probe` and
`sequential_probe`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from contract.jobs import TokenizerFiles
from workers.engine.limits import DEFAULT_STEP_TOKENS
from workers.engine.model import ModelRefused
from workers.messages import EngineOptions
from workers.model.attention.interface import CannotShareBatch
from workers.model.backend import Backend, choose_backend
from workers.model.checkpoint import (
    DEFAULT_REVISION,
    context_length,
    eos_token_ids,
    read_config,
)
from workers.model.gpu.ahead_runner import AheadRunner
from workers.model.gpu.graphs import check_steps, recorder
from workers.model.huge_pages import touch, use_huge_pages
from workers.model.int8_weights import check_quantization, num_weight_bytes, quantize
from workers.model.kv_cache import KVCache, LayerShape, token_bytes
from workers.model.memory import default_kv_bytes
from workers.model.probe import check_parity, probe_layers, streamline
from workers.model.processor import Processor
from workers.model.products import Products
from workers.model.rope import fix_rope
from workers.model.runner import ModelRunner
from workers.model.sequential import Continues, SequentialRunner
from workers.model.sequential_probe import StateShape, choose_continuation, measure_state
from workers.model.surgery.surgeon import operate
from workers.model.tokenizer import read_tokenizer
from workers.model.weights import load_decoder, use_own_attention

__all__ = ["LoadedModel", "ModelRefused", "load_model", "wrap_decoder"]

log = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 16
# The token budget of a step. A CPU's matrix product is at its best from some 128 rows on: a larger
# step only lets the streams beside a prompt wait longer (docs/decisions/cpu-steps.md).
_CPU_STEP_TOKENS = 256
# Weights of less than this lie in the caches, whatever pages they are on.
_LEAST_HUGE_BYTES = 2**24
# Of the KV cache, so much lies ready before the first step: up to some times the weights' bytes, so
# that a small model starts as fast as before.
_MOST_READY_BYTES = 2**29
_READY_PER_WEIGHT = 8
# From this factor on a type is called slower than float32: what is below may be noise.
_NOTABLE_SLOWDOWN = 1.15
# For models without a limit of their own, where the operator sets none.
DEFAULT_CONTEXT_LENGTH = 8192

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The model, and what gateways must know of it."""

    model: ModelRunner | AheadRunner | SequentialRunner
    context_length: int  # prompt + output, in tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerFiles
    num_step_tokens: int = DEFAULT_STEP_TOKENS  # the budget of a step that fits the device


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A decoder on its device, and what the choice of a runner depends on."""

    decoder: nn.Module
    config: PretrainedConfig
    device: torch.device
    dtype: torch.dtype
    options: EngineOptions
    max_model_len: int  # the operator's limit, or the model's own
    eos_token_ids: frozenset[int]
    processor: Processor | None = None  # the one at hand, unless a test narrows it

    @property
    def block_size(self) -> int:
        return self.options.block_size or DEFAULT_BLOCK_SIZE

    @property
    def kv_bytes(self) -> int:
        num_bytes = self.options.kv_memory_bytes
        return default_kv_bytes(self.device) if num_bytes is None else num_bytes

    @property
    def most_blocks(self) -> int:
        """What all sequences together could ever fill."""
        return self.options.max_num_seqs * -(-self.max_model_len // self.block_size)


def load_model(
    options: EngineOptions,
    progress: Callable[[str], None],
    processor: Processor | None = None,
) -> LoadedModel:
    """Loads, checks and sizes a model. Raises ModelRefused with one sentence for the operator."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    path, revision = options.model_path, options.revision or DEFAULT_REVISION
    config = read_config(path, revision)
    eos_ids = eos_token_ids(path, config, revision)
    tokenizer = read_tokenizer(path, revision)
    device = _device(options.device)
    check_steps(options.steps, device)
    check_quantization(options.quantization)
    dtype = _dtype(options.dtype, device, config)
    progress(f"loading {path} as {_name(dtype)} on {device}")
    decoder = load_decoder(path, config, dtype, device, revision)
    max_model_len = _max_model_len(options, config)
    if num_fixed := fix_rope(decoder, max_model_len):
        progress(f"fixed {num_fixed} rotary embedding(s) for {max_model_len} tokens")
    loaded = _Loaded(
        decoder, config, device, dtype, options, max_model_len, frozenset(eos_ids), processor
    )
    runner = _runner(loaded, progress)
    vocab_size = int(config.get_text_config().vocab_size)
    num_step_tokens = _CPU_STEP_TOKENS if device.type == "cpu" else DEFAULT_STEP_TOKENS
    return LoadedModel(
        runner, runner.max_model_len, vocab_size, eos_ids, tokenizer, num_step_tokens
    )


def wrap_decoder(
    decoder: nn.Module,
    config: PretrainedConfig,
    device: torch.device,
    options: EngineOptions,
    progress: Callable[[str], None],
    *,
    max_model_len: int,
) -> ModelRunner | AheadRunner | SequentialRunner:
    """What `load_model` makes of a decoder, for one that comes from no folder. Its attention must
    be ours already. Raises ModelRefused.
    """
    dtype = next(decoder.parameters()).dtype
    loaded = _Loaded(decoder, config, device, dtype, options, max_model_len, frozenset())
    return _runner(loaded, progress)


def _runner(
    loaded: _Loaded, progress: Callable[[str], None]
) -> ModelRunner | AheadRunner | SequentialRunner:
    """By the paged path where the model allows it, else one sequence at a time."""
    if loaded.options.quantization == "int8":
        progress(quantize(loaded.decoder))
    try:
        paged, backend = _paged_runner(loaded, progress)
    except CannotShareBatch as reason:
        use_own_attention(loaded.decoder)
        runner = _sequential_runner(loaded)
        progress(f"served one sequence at a time: {reason}; {runner.continues}")
        return runner
    progress(
        f"KV cache of {paged.num_blocks} blocks of {paged.block_size} tokens "
        f"({paged.cache.num_bytes / 2**20:.0f} MiB); up to {paged.max_model_len} tokens a sequence"
    )
    if loaded.options.steps == "direct":
        return paged
    record = recorder(loaded.options.steps)
    max_num_seqs = loaded.options.max_num_seqs
    return AheadRunner(paged, backend.prepare_rows, max_num_seqs, loaded.device, record)


def _paged_runner(loaded: _Loaded, progress: Callable[[str], None]) -> tuple[ModelRunner, Backend]:
    """Raises CannotShareBatch where paging is not this model's, ModelRefused where nothing is."""
    weight_bytes = num_weight_bytes(loaded.decoder, "cpu")
    shapes = probe_layers(loaded.decoder, loaded.config, loaded.device)
    cache = _build_cache(loaded, shapes)
    options = loaded.options
    backend = choose_backend(
        options.attention,
        loaded.dtype,
        loaded.device,
        cache.block_size,
        progress,
        fused=options.fused,
        weight_bytes=weight_bytes,
        processor=loaded.processor,
    )
    runner = ModelRunner(
        loaded.decoder,
        cache,
        backend.attention,
        eos_token_ids=loaded.eos_token_ids,
        max_model_len=_fit(loaded, cache.num_blocks),
        device=loaded.device,
        kernels=backend.kernels,
    )
    check_parity(loaded.decoder, runner, loaded.config, loaded.device)
    if backend.merges:
        done = operate(loaded.decoder, shapes, backend)
        cache.rename(done.attentions)
        how = "merged or packed" if backend.layout.packs else "merged"
        progress(f"{how} for this processor: {done}")
        if backend.layout.products is not None:
            _warn_if_slower(backend.layout.products, options, loaded.dtype)
        if num_own := len(shapes) - done.counts["attention layers"]:
            progress(f"{num_own} of {len(shapes)} attention layers stay as they are, unfused")
        if streamline(runner, loaded.decoder, loaded.config):
            progress("its layers run as one loop")
    if options.fused and weight_bytes >= _LEAST_HUGE_BYTES:
        num_bytes = use_huge_pages(cache.tensors)
        progress(f"{num_bytes / 2**20:.0f} MiB lie on huge pages")
    if loaded.device.type == "cpu":
        touch(cache.tensors, min(_MOST_READY_BYTES, _READY_PER_WEIGHT * weight_bytes))
    return runner, backend


def _warn_if_slower(products: Products, options: EngineOptions, dtype: torch.dtype) -> None:
    """Where float32 would be faster: says so, with the measured factors."""
    factors = products.slowdown()
    if max(factors.values(), default=0.0) < _NOTABLE_SLOWDOWN:
        return
    asked = "quantization int8" if options.quantization == "int8" else f"dtype {_name(dtype)}"
    times = ", ".join(f"{factor:.1f} with {rows}" for rows, factor in factors.items())
    log.warning(
        "%s is slower than float32 on this processor: time of its matrix products divided by that "
        "of float32, by rows in a step: %s",
        asked,
        times,
    )


def _sequential_runner(loaded: _Loaded) -> SequentialRunner:
    """Raises ModelRefused."""
    continues = choose_continuation(loaded.decoder, loaded.config, loaded.device)
    shape = StateShape(0, 0)
    if continues is not Continues.NEVER:
        shape = measure_state(loaded.decoder, loaded.config, loaded.device)
    num_blocks = _num_state_blocks(loaded, shape)
    return SequentialRunner(
        loaded.decoder,
        continues,
        num_blocks=num_blocks,
        block_size=loaded.block_size,
        eos_token_ids=loaded.eos_token_ids,
        max_model_len=_fit(loaded, num_blocks),
        device=loaded.device,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ModelRefused(f"device {name} is not one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelRefused("device cuda is asked for, but torch finds no CUDA device here")
    return torch.device(name)


def _dtype(name: str, device: torch.device, config: PretrainedConfig) -> torch.dtype:
    """auto: float32 on a CPU; on CUDA the checkpoint's own half type, or bfloat16."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        own = config.get_text_config().dtype
        return own if own in (torch.float16, torch.bfloat16) else torch.bfloat16
    if name not in _DTYPES:
        raise ModelRefused(f"dtype {name} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_model_len(options: EngineOptions, config: PretrainedConfig) -> int:
    """The operator's limit, or the model's own."""
    own = context_length(config)
    if options.max_model_len is None:
        return own or DEFAULT_CONTEXT_LENGTH
    if options.max_model_len < 1 or (own is not None and options.max_model_len > own):
        raise ModelRefused(
            f"max_model_len {options.max_model_len} is not within the model's {own} positions"
        )
    return options.max_model_len


def _build_cache(loaded: _Loaded, shapes: Mapping[nn.Module, LayerShape]) -> KVCache:
    """As many blocks as the memory holds, and no more than all sequences could ever fill."""
    num_bytes, block_size = loaded.kv_bytes, loaded.block_size
    block_bytes = token_bytes(shapes, loaded.dtype) * block_size
    num_blocks = min(num_bytes // block_bytes, loaded.most_blocks)
    needed = 2 * -(-16 // block_size)  # the two sequences of the probe
    if num_blocks < needed:
        raise ModelRefused(
            f"{num_bytes} bytes hold {num_blocks} blocks of KV of {block_bytes} bytes each; "
            f"at least {needed} are needed"
        )
    return KVCache(shapes, num_blocks, block_size, loaded.dtype, loaded.device)


def _num_state_blocks(loaded: _Loaded, shape: StateShape) -> int:
    """Blocks to count with, so that the states of all sequences stay within the memory."""
    max_num_seqs = loaded.options.max_num_seqs
    num_bytes = loaded.kv_bytes - max_num_seqs * shape.sequence_bytes
    block_bytes = max(1, shape.token_bytes * loaded.block_size)
    if num_bytes < block_bytes:
        raise ModelRefused(
            f"{loaded.kv_bytes} bytes do not hold the states of max_num_seqs {max_num_seqs} "
            f"sequences, {shape.sequence_bytes} bytes each; fewer sequences may"
        )
    if shape.token_bytes == 0:
        return loaded.most_blocks
    return min(num_bytes // block_bytes, loaded.most_blocks)


def _fit(loaded: _Loaded, num_blocks: int) -> int:
    """What one sequence can have at most, alone in the cache."""
    num_kv_tokens = num_blocks * loaded.block_size
    if loaded.options.max_model_len is not None and loaded.max_model_len > num_kv_tokens:
        raise ModelRefused(
            f"the KV cache holds {num_kv_tokens} tokens, less than "
            f"max_model_len {loaded.options.max_model_len}"
        )
    return min(loaded.max_model_len, num_kv_tokens)
