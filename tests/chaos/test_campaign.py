"""Campaigns short enough for every test run; `scripts/chaos` runs the long ones."""

import pytest

from tests.chaos.campaign import BATCH_CALLERS, FEW_CALLERS, CampaignOptions, run_campaign
from tests.chaos.clients import Browser, Messenger, Streamer, Submitter
from tests.chaos.faults import ENGINE_CORE, FAILOVERS, REDIS_FAILOVER, VLLM_KINDS
from tests.chaos.fleet import FleetOptions
from tests.chaos.ledger import Kind
from tests.chaos.mistakes import Mistake
from tests.chaos.report import Report
from tests.fakes import HashModelOptions
from tests.vllm_environment import vllm_python

# Longer than a story and the rest may take, 240 s each: then they are reported as lost. A campaign
# that is ended from outside reports nothing.
pytestmark = [pytest.mark.e2e, pytest.mark.anyio, pytest.mark.campaign, pytest.mark.timeout(900)]

SLOW = HashModelOptions(num_blocks=256, step_s=0.05, eos_rate=0.005)  # whose answers take seconds
SMALL = FleetOptions(num_workers=2, num_gateways=1, num_callbacks=1)


def assert_clean(report: Report) -> None:
    assert report.is_clean, report.as_table()
    assert report.ledger.stories_by_job
    assert report.ledger.num_tokens > 0


def test_no_fault_needs_a_fleet_of_another_kind() -> None:
    """As drawn by default: vLLM has an engine core, and no cluster."""
    assert ENGINE_CORE in VLLM_KINDS
    assert not {REDIS_FAILOVER, *FAILOVERS} & set(VLLM_KINDS)


@pytest.mark.parametrize("num_faults", [25, pytest.param(100, marks=pytest.mark.long)])
async def test_nothing_is_lost_and_nothing_is_repeated(num_faults: int) -> None:
    """Processes and Redis killed, stopped and drained, power cuts, full memory, lost replies, cut
    connections: every answer is exact, every job ends once, every callback is delivered."""
    report = await run_campaign(CampaignOptions(num_faults, seed=1, mean_gap_s=0.2))
    assert_clean(report)
    assert report.faults.total() >= num_faults
    assert report.ledger.num_deliveries >= report.ledger.num_callbacks > 0
    assert report.ledger.counts["prompts left to workers"] > 0


@pytest.mark.parametrize(
    ("num_faults", "gap_s"), [(6, 0.8), pytest.param(60, 2.0, marks=pytest.mark.long)]
)
async def test_messages_pages_and_later_jobs_outlive_gateways_and_workers(
    num_faults: int, gap_s: float
) -> None:
    """A message is asked for again with its key, a page goes on with its token at another gateway:
    each answer is whole, each token comes once, each key has one job, and none starts early."""
    options = CampaignOptions(
        num_faults,
        seed=12,
        mean_gap_s=gap_s,
        callers={Messenger: 8, Browser: 6, Submitter: 3},
        kinds=("gateway kill -9", "worker kill -9"),
        fleet=FleetOptions(num_gateways=3, num_callbacks=1, hash_model=SLOW),
    )
    report = await run_campaign(options)
    assert_clean(report)
    assert all(report.faults[kind] > 1 for kind in options.kinds)
    counts = report.ledger.counts
    assert sum(counts[f"{kind.kind} streams that went on"] for kind in (Messenger, Browser)) > 0
    assert any(story.start_at for story in report.ledger.stories)


async def test_each_call_of_a_flow_runs_to_one_end() -> None:
    """Also where the gateways that run the flows are killed: usage adds up, no call is lost."""
    options = CampaignOptions(8, seed=6, mean_gap_s=0.5, flows=True, callers=FEW_CALLERS)
    report = await run_campaign(options)
    assert_clean(report)
    assert report.ledger.counts["calls of flows"] > 0


async def test_each_line_of_a_batch_is_answered_once() -> None:
    """With the results of an undisturbed run, while workers, the gateways that feed, and Redis are
    killed."""
    options = CampaignOptions(
        5,
        seed=7,
        mean_gap_s=0.5,
        callers=BATCH_CALLERS,
        batch_lines=150,
        fleet=FleetOptions(num_workers=2, num_callbacks=1),
    )
    report = await run_campaign(options)
    assert report.is_clean, report.as_table()
    assert report.ledger.counts["lines of batches"] >= 150
    assert report.ledger.num_tokens > 0


async def test_jobs_of_a_real_model_resume_after_faults() -> None:
    """The demo model: the tokens of its undisturbed run, except for near-ties."""
    kinds = ("engine kill -9", "worker SIGSTOP", "reply lost", "link parted")  # no slow starts
    options = CampaignOptions(
        4, seed=2, model="demo", mean_gap_s=0.2, callers=FEW_CALLERS, fleet=SMALL, kinds=kinds
    )
    assert_clean(await run_campaign(options))


async def test_jobs_on_vllm_resume_after_faults() -> None:
    """The demo model on vLLM, whose engine core is killed. What does not meet the engine is in the
    campaigns above: it takes effect sooner, and left no draw for the engine core."""
    vllm_python()
    kinds = (ENGINE_CORE,)
    options = CampaignOptions(
        3, seed=4, model="vllm", mean_gap_s=0.5, callers=FEW_CALLERS, fleet=SMALL, kinds=kinds
    )
    report = await run_campaign(options)
    assert_clean(report)
    assert report.faults[ENGINE_CORE]


async def test_a_redis_that_loses_its_last_second_resets_streams() -> None:
    """Power cuts with `everysec`: only recent writes were lost, and no stream was spliced."""
    options = CampaignOptions(
        3, seed=3, fsync="everysec", kinds=("redis power cut",), callers=FEW_CALLERS, fleet=SMALL
    )
    report = await run_campaign(options)
    assert_clean(report)
    assert report.num_bytes_lost > 0


async def test_a_failover_resets_streams() -> None:
    """A replica that lags takes over from the killed primary: the functions run there, what it
    had not received is lost, and no stream was spliced."""
    options = CampaignOptions(
        3, seed=5, fsync="everysec", kinds=(REDIS_FAILOVER,), callers=FEW_CALLERS, fleet=SMALL
    )
    report = await run_campaign(options)
    assert_clean(report)
    assert report.num_bytes_lost > 0


@pytest.mark.parametrize("awaits", [True, False])
async def test_a_cluster_loses_what_its_replicas_had_not_received_and_nothing_that_was_awaited(
    awaits: bool,
) -> None:
    """Four partitions: primaries die with their replicas behind."""
    fleet = FleetOptions(num_workers=4, num_callbacks=1, num_partitions=4, awaits=awaits)
    others = ("replica promoted",)
    kills = ("primary kill -9",) * 3  # which alone lose writes; drawn most, so that some are met
    kinds = (*kills, *(others if awaits else ()))
    options = CampaignOptions(
        6 if awaits else 3, seed=8, mean_gap_s=0.2, callers=FEW_CALLERS, fleet=fleet, kinds=kinds
    )
    report = await run_campaign(options)
    assert_clean(report)
    assert report.num_bytes_lost > 0


@pytest.mark.parametrize(
    "mistake", [Mistake.WORKER_FORGETS_THE_LOG, Mistake.GATEWAY_SKIPS_AN_EVENT]
)
async def test_a_planted_mistake_is_found(mistake: Mistake) -> None:
    """A campaign that could not fail would prove nothing."""
    options = CampaignOptions(
        20,
        kinds=("worker kill -9", "worker SIGTERM"),
        callers={Streamer: 4},
        fleet=SMALL,
        mistake=mistake,
        stops_at_violation=True,
    )
    report = await run_campaign(options)
    assert {Kind.WRONG, Kind.DUPLICATED, Kind.LOST} & {v.kind for v in report.ledger.violations}
