"""How options become the engine's parts, and the lanes that a worker claims from."""

from workers.engine.strategy import ContinuousBatching, DynamicBatching, StaticBatching
from workers.engine_process.engine_setup import strategies_of
from workers.ipc.messages import EngineOptions, LaneOptions, StrategyOptions
from workers.lanes import lanes_of, lanes_to_claim
from workers.settings import LANES


def test_a_lane_keeps_the_defaults_that_its_options_leave_out() -> None:
    """A new lane has the defaults of standard; the others keep their own."""
    options = EngineOptions(model_path="m", lanes=(LaneOptions(name="night", priority=9),))

    lanes = {lane.name: lane for lane in lanes_of(options.lanes)}

    assert (lanes["night"].priority, lanes["night"].itl_target_s) == (9, None)
    assert lanes["interactive"].itl_target_s == 0.1
    assert lanes["batch"].min_share == 0.05


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


def test_lanes_are_claimed_by_priority_with_their_shares() -> None:
    """An operator's own lane is included at its priority; batch keeps its default share."""
    urgent = LaneOptions(name="urgent", priority=0)
    given = lanes_to_claim(LANES, [urgent], adds_given=True)
    assert list(given) == ["interactive", "urgent", "standard", "scoring", "batch"]
    assert given["batch"].min_share == 0.05


def test_given_shares_replace_the_default_shares() -> None:
    """As in the engine, or a valid file plus a default could exceed 1. Lanes named on the command
    line remain the only ones."""
    given = [LaneOptions(name="standard", min_share=0.2), LaneOptions(name="urgent", priority=0)]
    terms = lanes_to_claim(("batch", "standard"), given, adds_given=False)
    shares = {name: lane.min_share for name, lane in terms.items()}
    assert shares == {"standard": 0.2, "batch": 0.0}
    assert list(shares) == ["standard", "batch"]
    assert sum(lane.min_share for lane in lanes_of(tuple(given))) == 0.2
