"""Loads a model folder or Hub name; if it cannot, gives a one-sentence reason.

Reads safetensors only and runs no code of the model. Checks are in `checkpoint`, `paged` and
`sequential_probe`, reading in `weights`. The folder decides whether the model generates or makes
vectors, as those of `pooling` do.
"""

import logging
from collections.abc import Callable

import torch
from torch import nn
from transformers import PretrainedConfig

from contract.jobs import resume_kind
from contract.model_cards import GenerationDefaults
from workers.engine.interface import DEFAULT_STEP_TOKENS, LoadedModel, ModelRefused
from workers.ipc.channel import PeerGone
from workers.ipc.messages import EngineOptions
from workers.model.attention.interface import CannotShareBatch
from workers.model.checkpoint import DEFAULT_REVISION, context_length, first_line, read_config
from workers.model.device import (
    capability_of,
    choose_device,
    choose_dtype,
    device_name,
    dtype_name,
    gpu_uuids,
)
from workers.model.files import ModelFiles
from workers.model.generation import end_token_ids, sampling_defaults
from workers.model.loaded import Loaded
from workers.model.machine import available_cores
from workers.model.matmul_choice import Processor
from workers.model.memory import check_free, check_weights, free_bytes
from workers.model.model_path import least_weight_bytes
from workers.model.paged import paged_runner
from workers.model.pooling.folder import PoolingFolder, read_folder
from workers.model.pooling.loading import Place, default_step_tokens, load_runner
from workers.model.quantization import check_quantization
from workers.model.rope import fix_rope
from workers.model.runner import ModelRunner
from workers.model.sequential import (
    Continues,
    SequentialRunner,
    StateShape,
    choose_continuation,
    measure_state,
)
from workers.model.tokenizer import read_tokenizer
from workers.model.weights import load_decoder, told_weights, use_own_attention

log = logging.getLogger(__name__)

__all__ = ["LoadedModel", "ModelRefused", "load_model"]

# Default token budget. A CPU's matrix products are efficient from about 128 rows on; larger steps
# only delay the streams beside a prompt (docs/decisions/cpu-products.md).
_CPU_STEP_TOKENS = 256
# If neither the model nor the operator sets a limit.
DEFAULT_CONTEXT_LENGTH = 8192


def load_model(
    options: EngineOptions,
    progress: Callable[[str], None],
    processor: Processor | None = None,
) -> LoadedModel:
    """Loads, checks and sizes a model. Raises ModelRefused with one sentence for the operator."""
    try:
        return _load(options, progress, processor)
    except (ModelRefused, PeerGone, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as exc:  # a family that a library does not serve as it says
        log.debug("the traceback of the refusal", exc_info=True)
        raise ModelRefused(f"{options.model_path} cannot be loaded: {first_line(exc)}") from exc


def _load(
    options: EngineOptions, progress: Callable[[str], None], processor: Processor | None
) -> LoadedModel:
    torch.set_num_threads(options.num_threads or min(torch.get_num_threads(), available_cores()))
    path, revision = options.model_path, options.revision or DEFAULT_REVISION
    if (folder := read_folder(path, revision)) is not None:
        return _load_pooling(folder, options, progress)
    progress(f"reading configuration and tokenizer of {path}")
    config = read_config(path, revision)
    tokenizer = read_tokenizer(
        path,
        revision,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        template_kwargs=options.chat_template_kwargs,
    )
    vocab_size = int(config.get_text_config().vocab_size)
    files = ModelFiles(path, revision)
    eos_ids = end_token_ids(files, config, tokenizer)
    generation = GenerationDefaults()
    if options.generation_config == "auto":
        generation = sampling_defaults(files, vocab_size)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, config, capability_of(device))
    check_quantization(options.quantization, device)
    _check_memory(options, files, device, dtype)
    progress(f"loading {path} as {dtype_name(dtype)} on {device}")
    max_model_len = _max_model_len(options, config)

    def read() -> nn.Module:
        with told_weights(progress):
            decoder = load_decoder(path, config, dtype, device, revision)
        if num_fixed := fix_rope(decoder, max_model_len):
            progress(f"fixed {num_fixed} rotary embedding(s) for {max_model_len} tokens")
        return decoder

    loaded = Loaded(
        read, config, device, dtype, options, max_model_len, frozenset(eos_ids), processor
    )
    runner = _runner(loaded, progress)
    num_step_tokens = _CPU_STEP_TOKENS if device.type == "cpu" else DEFAULT_STEP_TOKENS
    computes_in = dtype_name(dtype) if options.quantization == "none" else options.quantization
    return LoadedModel(
        runner,
        runner.max_model_len,
        vocab_size,
        eos_ids,
        tokenizer,
        num_step_tokens,
        generation,
        resume=resume_kind(device.type, computes_in),
        device=device_name(device),
        gpu_uuids=gpu_uuids(device),
    )


def _load_pooling(
    folder: PoolingFolder, options: EngineOptions, progress: Callable[[str], None]
) -> LoadedModel:
    """Loads a prefill-only model. Raises ModelRefused."""
    path, revision = options.model_path, folder.files.revision
    if options.quantization != "none":
        raise ModelRefused(f"{path} makes vectors, which needs quantization none")
    config = read_config(path, revision, pools=True)
    tokenizer = read_tokenizer(path, revision)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, config, capability_of(device))
    place = Place(device, dtype, options.memory_share)
    _check_memory(options, folder.files, device, dtype)
    progress(f"loading {path} as {dtype_name(dtype)} on {device}, for vectors")
    runner, card, tokenizer = load_runner(
        folder,
        path,
        config,
        place,
        tokenizer,
        progress,
        max_model_len=options.max_model_len,
        num_step_tokens=options.max_num_batched_tokens,
    )
    vocab_size = int(config.get_text_config().vocab_size)
    return LoadedModel(
        runner,
        runner.max_model_len,
        vocab_size,
        (),
        tokenizer,
        default_step_tokens(device),
        pooling=card,
        tokens_per_s=runner.tokens_per_s,
        resume=resume_kind(device.type, dtype_name(dtype)),
        device=device_name(device),
        gpu_uuids=gpu_uuids(device),
    )


def _check_memory(
    options: EngineOptions, files: ModelFiles, device: torch.device, dtype: torch.dtype
) -> None:
    """Raises ModelRefused if the weights, by their files, exceed the memory that is free, or the
    worker's share. A model of the Hub must have been fetched before."""
    config = files.find("config.json")
    least = least_weight_bytes(
        str(config.parent) if config else options.model_path,
        dtype_name(dtype),
        options.quantization,
        on_gpu=device.type == "cuda",
    )
    if options.memory_share is not None:
        check_weights(options.memory_share, device, least)
    check_free(device, least, free_bytes(device))


def _runner(loaded: Loaded, progress: Callable[[str], None]) -> ModelRunner | SequentialRunner:
    """Uses the paged path if the model supports it, else one sequence at a time."""
    loaded.renew(progress)
    try:
        paged = paged_runner(loaded, progress)
    except CannotShareBatch as exc:
        reason = str(exc)  # drop the traceback: it holds a KV cache
    else:
        progress(
            f"KV cache of {paged.num_blocks} blocks of {paged.block_size} tokens "
            f"({paged.cache.num_bytes / 2**20:.0f} MiB); up to {paged.max_model_len} tokens a "
            "sequence"
        )
        return paged
    use_own_attention(loaded.decoder)
    progress("trying one sequence at a time")
    runner = _sequential_runner(loaded)
    progress(f"served one sequence at a time: {reason}; {runner.continues}")
    return runner


def _sequential_runner(loaded: Loaded) -> SequentialRunner:
    """Returns a runner of one sequence at a time. Raises ModelRefused."""
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
        max_model_len=loaded.longest(num_blocks),
        device=loaded.device,
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


def _num_state_blocks(loaded: Loaded, shape: StateShape) -> int:
    """A block count that keeps the states of all sequences within the memory."""
    max_num_seqs = loaded.options.num_places
    state_bytes = max_num_seqs * shape.sequence_bytes
    kv_bytes = loaded.kv_bytes(shape.token_bytes, state_bytes)
    num_bytes = kv_bytes - state_bytes
    block_bytes = max(1, shape.token_bytes * loaded.block_size)
    if num_bytes < block_bytes:
        raise ModelRefused(
            f"{kv_bytes} bytes do not hold the states of max_num_seqs {max_num_seqs} "
            f"sequences, {shape.sequence_bytes} bytes each; fewer sequences may"
        )
    if shape.token_bytes == 0:
        return loaded.most_blocks
    return min(num_bytes // block_bytes, loaded.most_blocks)
