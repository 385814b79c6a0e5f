"""Turns a model folder or Hub name into a model that runs, or into one sentence why not.

Safetensors only, never code that comes with a model. Leaves the checks of the configuration to
`checkpoint` and those of the running model to `probe`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as transformers_logging

from contract.jobs import TokenizerFiles
from workers.engine.model import ModelRefused
from workers.messages import EngineOptions
from workers.model.attention.interface import ATTENTION_NAME, register_attention
from workers.model.attention.packed import PackedAttention
from workers.model.checkpoint import context_length, eos_token_ids, first_line, read_config
from workers.model.kv_cache import KVCache, LayerShape, token_bytes
from workers.model.memory import default_kv_bytes
from workers.model.probe import check_parity, own_attention, probe_layers
from workers.model.rope import fix_rope
from workers.model.runner import ModelRunner
from workers.model.tokenizer import read_tokenizer

__all__ = ["LoadedModel", "ModelRefused", "load_model"]

log = logging.getLogger("batchway.model")

DEFAULT_BLOCK_SIZE = 16
# For models without a limit of their own, where the operator sets none.
DEFAULT_CONTEXT_LENGTH = 8192

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The model, and what gateways must know of it."""

    model: ModelRunner
    context_length: int  # prompt + output, in tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerFiles


def load_model(options: EngineOptions, progress: Callable[[str], None]) -> LoadedModel:
    """Loads, checks and sizes a model. Raises ModelRefused with one sentence for the operator."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    path = options.model_path
    config = read_config(path)
    eos_ids = eos_token_ids(path, config)
    tokenizer = read_tokenizer(path)
    device = _device(options.device)
    dtype = _dtype(options.dtype, device, config)
    progress(f"loading {path} as {_name(dtype)} on {device}")
    decoder = _load_decoder(path, config, dtype, device)
    max_model_len = _max_model_len(options, config)
    if num_fixed := fix_rope(decoder, max_model_len):
        progress(f"fixed {num_fixed} rotary embedding(s) for {max_model_len} tokens")
    shapes = probe_layers(decoder, config, device)
    cache = _build_cache(options, shapes, max_model_len, dtype, device)
    max_model_len = _fit(options, max_model_len, cache.num_blocks * cache.block_size)
    runner = ModelRunner(
        decoder,
        cache,
        PackedAttention(),
        eos_token_ids=frozenset(eos_ids),
        max_model_len=max_model_len,
        device=device,
    )
    check_parity(decoder, runner, config, device)
    progress(
        f"KV cache of {cache.num_blocks} blocks of {cache.block_size} tokens "
        f"({cache.num_bytes / 2**20:.0f} MiB); up to {max_model_len} tokens a sequence"
    )
    vocab_size = int(config.get_text_config().vocab_size)
    return LoadedModel(runner, max_model_len, vocab_size, eos_ids, tokenizer)


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


def _load_decoder(
    path: str, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    register_attention()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        decoder, info = loaded
        decoder.to(device)
    except SafetensorError as exc:
        raise ModelRefused(f"a weight file of {path} is damaged: {first_line(exc)}") from exc
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as exc:
        if exc.args == (ATTENTION_NAME,):  # a table of the model's own attention classes
            raise ModelRefused(own_attention(path)) from exc
        raise ModelRefused(f"{path} cannot be loaded: {first_line(exc)}") from exc
    _check_weights(path, info)
    frozen: nn.Module = decoder.eval().requires_grad_(False)
    return frozen


def _check_weights(path: str, info: Mapping[str, Any]) -> None:
    """transformers fills what a checkpoint lacks with random numbers; we refuse it."""
    for kind in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, info.get(kind) or ())):
            raise ModelRefused(
                f"the weights of {path} do not fit its configuration: "
                f"{len(names)} {kind.removesuffix('_keys')}, for example {names[0]}"
            )


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


def _build_cache(
    options: EngineOptions,
    shapes: Mapping[nn.Module, LayerShape],
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """As many blocks as the memory holds, and no more than all sequences could ever fill."""
    block_size = options.block_size or DEFAULT_BLOCK_SIZE
    num_bytes = options.kv_memory_bytes
    if num_bytes is None:
        num_bytes = default_kv_bytes(device)
    block_bytes = token_bytes(shapes, dtype) * block_size
    most = options.max_num_seqs * -(-max_model_len // block_size)
    num_blocks = min(num_bytes // block_bytes, most)
    needed = 2 * -(-16 // block_size)  # the two sequences of the probe
    if num_blocks < needed:
        raise ModelRefused(
            f"{num_bytes} bytes hold {num_blocks} blocks of KV of {block_bytes} bytes each; "
            f"at least {needed} are needed"
        )
    return KVCache(shapes, num_blocks, block_size, dtype, device)


def _fit(options: EngineOptions, max_model_len: int, num_kv_tokens: int) -> int:
    """What one sequence can have at most, alone in the cache."""
    if options.max_model_len is not None and max_model_len > num_kv_tokens:
        raise ModelRefused(
            f"the KV cache holds {num_kv_tokens} tokens, less than "
            f"max_model_len {options.max_model_len}"
        )
    return min(max_model_len, num_kv_tokens)
