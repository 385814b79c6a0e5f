"""From options to the engine and its parts. Nothing is started here."""

import dataclasses

from workers.engine.engine import Engine
from workers.engine.lanes import DEFAULT_LANES, STANDARD, Lane
from workers.engine.limits import DEFAULT_STEP_TOKENS, EngineLimits
from workers.engine.model import Model
from workers.engine.policies import Composed, FirstComeFirstServed, VirtualTokenCounters
from workers.engine.strategy import Strategies, Strategy
from workers.ipc.batching import DYNAMIC_WINDOW_S, STATIC_WAIT_S, StrategyOptions
from workers.ipc.messages import EngineOptions
from workers.strategies.continuous import ContinuousBatching
from workers.strategies.dynamic import DynamicBatching
from workers.strategies.static import StaticBatching


def build_engine(
    model: Model,
    vocab_size: int,
    options: EngineOptions,
    num_step_tokens: int = DEFAULT_STEP_TOKENS,
) -> Engine:
    """The engine that the options describe, around a loaded model; `num_step_tokens`: the budget
    of a step that fits its device.
    """
    weights = f"{options.model_path} {options.revision} {options.dtype} {options.quantization}"
    return Engine(
        model,
        limits_of(options, vocab_size, num_step_tokens),
        strategies_of(options),
        Composed(VirtualTokenCounters(), FirstComeFirstServed()),
        lanes=lanes_of(options),
        model_revision=weights,
    )


def limits_of(
    options: EngineOptions, vocab_size: int, num_step_tokens: int = DEFAULT_STEP_TOKENS
) -> EngineLimits:
    """`num_step_tokens`: the budget of a step where the options name none."""
    return EngineLimits(
        max_num_batched_tokens=options.max_num_batched_tokens or num_step_tokens,
        max_num_seqs=options.max_num_seqs,
        vocab_size=vocab_size,
        kv_high_water=options.kv_high_water,
        prefill_share=options.prefill_share,
        grows_ahead=options.steps != "direct",
        prefix_caching=options.prefix_caching,
    )


def lanes_of(options: EngineOptions) -> list[Lane]:
    """The engine's own lanes, changed and added to as the options say.

    Minimum shares that are given are all there are: with the defaults they might exceed the whole.
    """
    lanes = {lane.name: lane for lane in DEFAULT_LANES}
    if any(given.min_share is not None for given in options.lanes):
        lanes = {name: dataclasses.replace(lane, min_share=0.0) for name, lane in lanes.items()}
    for given in options.lanes:
        lane = lanes.get(given.name) or dataclasses.replace(STANDARD, name=given.name)
        names = ("priority", "itl_target_s", "min_share", "ageing_tokens")
        values = {name: getattr(given, name) for name in names}
        changes = {name: value for name, value in values.items() if value is not None}
        lanes[given.name] = dataclasses.replace(lane, **changes)
    return list(lanes.values())


def strategies_of(options: EngineOptions) -> Strategies:
    """The strategy of all lanes, and of those that name their own."""
    by_lane = {
        lane.name: _strategy(lane.strategy, options.max_num_seqs)
        for lane in options.lanes
        if lane.strategy is not None
    }
    return Strategies(_strategy(options.strategy, options.max_num_seqs), by_lane)


def _strategy(options: StrategyOptions, max_num_seqs: int) -> Strategy:
    """A batch is never larger than what may run: it would not fill up."""
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
