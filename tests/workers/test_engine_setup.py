"""How options become the engine's parts."""

from workers.engine.strategy import ContinuousBatching, DynamicBatching, StaticBatching
from workers.engine_process.engine_setup import strategies_of
from workers.ipc.messages import EngineOptions, LaneOptions, StrategyOptions
from workers.lanes import lanes_of


def test_a_lane_keeps_the_defaults_that_its_options_leave_out() -> None:
    """A new lane has the defaults of standard; the others keep their own."""
    options = EngineOptions(model_path="m", lanes=(LaneOptions(name="night", priority=9),))

    lanes = {lane.name: lane for lane in lanes_of(options.lanes)}

    assert (lanes["night"].priority, lanes["night"].itl_target_s) == (9, None)
    assert lanes["interactive"].itl_target_s == 0.1
    assert lanes["batch"].min_share == 0.05


def test_given_minimum_shares_replace_all_defaults() -> None:
    """Otherwise a valid file plus a default could exceed 1 and stop the engine."""
    options = EngineOptions(
        model_path="m",
        lanes=(LaneOptions(name="standard", min_share=0.98),),
    )

    assert sum(lane.min_share for lane in lanes_of(options.lanes)) == 0.98


def test_strategies_are_built_with_their_own_defaults() -> None:
    """A window of one second for static and of 20 ms for dynamic; no batch larger than the number
    of places."""
    night = LaneOptions(name="night", strategy=StrategyOptions(name="static", batch_size=32))
    options = EngineOptions(
        model_path="m",
        max_num_seqs=16,
        strategy=StrategyOptions(name="dynamic", bucket_edges=(8,)),
        lanes=(night, LaneOptions(name="day", strategy=StrategyOptions())),
    )

    strategies = strategies_of(options)

    assert strategies.default == DynamicBatching(8, 0.02, (8,))
    assert strategies.by_lane == {"night": StaticBatching(16, 1.0), "day": ContinuousBatching()}
