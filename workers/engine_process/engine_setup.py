"""Builds the engine and its parts from options. Starts nothing."""

import logging
import time
from collections.abc import Callable

from contract.model_cards import Capabilities
from workers.engine.engine import Engine
from workers.engine.grammar import GrammarFailed, Grammars
from workers.engine.interface import DEFAULT_STEP_TOKENS, EngineLimits, LoadedModel, Model
from workers.engine.strategy import (
    ContinuousBatching,
    DynamicBatching,
    StaticBatching,
    Strategies,
    Strategy,
)
from workers.ipc.messages import (
    DYNAMIC_WINDOW_S,
    STATIC_WAIT_S,
    EngineOptions,
    EngineReady,
    StrategyOptions,
)
from workers.lanes import lanes_of

log = logging.getLogger("batchway.engine")


def build_engine(
    model: Model,
    vocab_size: int,
    options: EngineOptions,
    num_step_tokens: int = DEFAULT_STEP_TOKENS,
    grammars: Grammars | None = None,
    *,
    prefill_only: bool = False,
    clock_s: Callable[[], float] = time.monotonic,
) -> Engine:
    """Builds the engine for a loaded model; `num_step_tokens` is the device's default token
    budget.
    """
    weights = f"{options.model_path} {options.revision} {options.dtype} {options.quantization}"
    return Engine(
        model,
        limits_of(
            options,
            vocab_size,
            num_step_tokens,
            prefill_only=prefill_only,
        ),
        strategies_of(options),
        clock_s,
        lanes=lanes_of(options.lanes),
        model_revision=weights,
        grammars=grammars,
    )


def limits_of(
    options: EngineOptions,
    vocab_size: int,
    num_step_tokens: int = DEFAULT_STEP_TOKENS,
    *,
    prefill_only: bool = False,
) -> EngineLimits:
    """The engine's limits. `num_step_tokens`: a step's token budget if the options name none."""
    return EngineLimits(
        max_num_batched_tokens=options.max_num_batched_tokens or num_step_tokens,
        max_num_seqs=options.num_places,
        vocab_size=vocab_size,
        kv_high_water=options.kv_high_water,
        prefill_share=options.prefill_share,
        prefix_caching=options.prefix_caching,
        speculates=options.speculation,
        prefill_only=prefill_only,
    )


def strategies_of(options: EngineOptions) -> Strategies:
    """The default strategy, and those of lanes that name their own."""
    by_lane = {
        lane.name: _strategy(lane.strategy, options.num_places)
        for lane in options.lanes
        if lane.strategy is not None
    }
    return Strategies(_strategy(options.strategy, options.num_places), by_lane)


def _strategy(options: StrategyOptions, max_num_seqs: int) -> Strategy:
    """Limits the batch size to `max_num_seqs`; a larger batch would never fill."""
    batch_size = min(options.batch_size, max_num_seqs)
    match options.name:
        case "continuous":
            return ContinuousBatching()
        case "static":
            return StaticBatching(
                batch_size,
                STATIC_WAIT_S if options.window_s is None else options.window_s,
                options.drain_share,
                options.padded,
            )
        case "dynamic":
            return DynamicBatching(
                batch_size,
                DYNAMIC_WINDOW_S if options.window_s is None else options.window_s,
                options.bucket_edges,
                options.padded,
            )


def load_grammars(loaded: LoadedModel) -> Grammars | None:
    """The compiler of grammars; None if the tokenizer cannot be used for structured output."""
    tokenizer_json = loaded.tokenizer.tokenizer_json
    try:
        return Grammars(tokenizer_json, loaded.vocab_size, loaded.eos_token_ids)
    except GrammarFailed as failure:
        log.warning("structured output is off: %s", failure)
        return None


def ready_message(loaded: LoadedModel, options: EngineOptions, can: Capabilities) -> EngineReady:
    """The message. The context length is limited to what the KV cache can hold for one sequence."""
    model = loaded.model
    num_kv_tokens = model.num_blocks * model.block_size
    return EngineReady(
        context_length=min(loaded.context_length, model.max_model_len, num_kv_tokens),
        vocab_size=loaded.vocab_size,
        eos_token_ids=tuple(sorted(loaded.eos_token_ids)),
        tokenizer=loaded.tokenizer,
        num_blocks=model.num_blocks,
        block_size=model.block_size,
        capabilities=can,
        generation=loaded.generation,
        pooling=loaded.pooling,
        tokens_per_s=loaded.tokens_per_s,
        num_step_tokens=options.max_num_batched_tokens or loaded.num_step_tokens,
        device=loaded.device,
        gpu_uuids=loaded.gpu_uuids,
    )
