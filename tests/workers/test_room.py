"""The number of jobs that a worker claims: as many as the next step has places for."""

import math
from collections.abc import Mapping

import msgspec
import pytest

from contract.function_types import MAX_CLAIM, Claimed, FairRoom, LaneRoom
from contract.functions import Functions
from contract.jobs import FinishReason
from infra.embedded_redis import EmbeddedRedis
from tests.contract.test_residence import HELD, beat, run, submit
from tests.contract.test_residence import job_of as job_of_residence
from tests.fakes import VOCAB_SIZE, hash_tokenizer
from tests.hash_worker import hash_worker_settings
from tests.workers.held import hold, job_of
from tests.workers.test_worker_broker import Clock
from workers.ipc.messages import (
    ChoiceEnded,
    EngineLoad,
    EngineOptions,
    EngineReady,
    LaneOptions,
    StrategyOptions,
    TokenOut,
)
from workers.lanes import Lane
from workers.supervisor.claims import POLL_S, Claims
from workers.supervisor.held_job import HeldJob
from workers.supervisor.holding import EngineLink, Holding
from workers.supervisor.worker_broker import WorkerBroker

NUM_PLACES = 4
READY = EngineReady(512, VOCAB_SIZE, (), hash_tokenizer(), 64, 16, NUM_PLACES)


@pytest.fixture
def holding() -> Holding:
    """The held jobs of a worker whose engine is ready."""
    options = EngineOptions(model_path="hash", max_num_seqs=NUM_PLACES)
    return Holding(EngineLink(options, ready=READY))


def start(
    holding: Holding,
    job_id: str,
    max_tokens: int = 3,
    n: int = 1,
    lane: str = "standard",
    cost_tokens: int = 6,
    tenant: str = "t",
) -> HeldJob:
    params = {"max_tokens": max_tokens, "seed": 1, "n": n}
    job = job_of((1, 2, 3), params=params, id=job_id, tenant=tenant, lane=lane)
    held = hold(job, cost_tokens=cost_tokens)
    holding.start(held)
    return held


def places(holding: Holding, now_s: float = 0.0) -> int:
    room = holding.room(now_s)
    return 0 if room is None else room.max_jobs


def test_the_engines_own_number_of_places_goes_before_that_of_the_options(holding: Holding) -> None:
    """vLLM has its own default, and keeps it when batching.yaml is read again; batchway's own
    engine follows the options. Before an engine is ready there are none."""
    engine = holding.engine
    for own, asked, expected in ((9, 2, 9), (9, None, 9), (None, 2, 2), (None, None, 256)):
        engine.ready = msgspec.structs.replace(READY, max_num_seqs=own)
        engine.options = EngineOptions(model_path="hash", max_num_seqs=asked)
        assert places(holding) == min(expected, MAX_CLAIM)  # of one claim
        assert holding.capacity(0.0, {}).max_jobs == expected
    engine.forget()
    assert holding.capacity(0.0, {}).max_jobs == 0


def test_a_job_in_its_last_step_leaves_its_place(holding: Holding) -> None:
    """It has one token left and ends with the current step: another job may be claimed before that,
    so that no step has an empty place."""
    jobs = [start(holding, str(number)) for number in range(NUM_PLACES)]
    assert places(holding) == 0
    jobs[0].take(TokenOut(jobs[0].job.id, 1, 0, 0, 97))
    assert places(holding) == 0
    jobs[0].take(TokenOut(jobs[0].job.id, 1, 0, 1, 97))
    assert places(holding) == 1
    start(holding, "next")
    assert places(holding) == 0
    jobs[0].take(TokenOut(jobs[0].job.id, 1, 0, 2, 97, FinishReason.LENGTH))
    assert places(holding) == 0


def test_a_place_that_comes_free_is_given_away_at_the_last_call(holding: Holding) -> None:
    """Jobs that arrive during the step may get it. A place that is empty already is filled at
    once."""
    job = start(holding, "ends", max_tokens=2, lane="interactive")
    holding.engine.steps.end(1.0)
    holding.engine.steps.begin(10.0)
    assert holding.rest_s(10.0, checked_s=9.0) == math.inf  # nothing ends with this step
    job.take(TokenOut("ends", 1, 0, 0, 97))
    claim_deadline_s = holding.engine.steps.claim_deadline_s
    assert holding.rest_s(10.0, checked_s=9.0) == claim_deadline_s - 10.0
    assert places(holding, 10.0) == NUM_PLACES - 1
    assert places_of(holding, 10.0) == dict.fromkeys(TERMS, NUM_PLACES - 1)
    assert places(holding, claim_deadline_s) == NUM_PLACES
    assert places_of(holding, claim_deadline_s) == dict.fromkeys(TERMS, NUM_PLACES)
    assert holding.rest_s(claim_deadline_s, checked_s=claim_deadline_s) == math.inf


def test_a_last_call_between_two_checks_is_still_made(holding: Holding) -> None:
    """The earlier check found no place; to wait longer would leave the place empty for the next
    step."""
    job = start(holding, "ends", max_tokens=2)
    holding.engine.steps.end(1.0)
    holding.engine.steps.begin(10.0)
    job.take(TokenOut("ends", 1, 0, 0, 97))
    claim_deadline_s = holding.engine.steps.claim_deadline_s
    assert holding.rest_s(claim_deadline_s + 0.001, checked_s=claim_deadline_s - 0.001) < 0


def test_an_engine_that_is_gone_has_no_step_under_way(holding: Holding) -> None:
    """The next engine starts with whatever arrives first."""
    holding.engine.steps.end(1.0)
    holding.engine.steps.begin(10.0)
    holding.engine.forget()
    assert holding.engine.steps.claim_deadline_s == -math.inf


def test_a_choice_that_has_ended_leaves_its_tokens(holding: Holding) -> None:
    """Of a job larger than the worker's room, long before its last choice ends."""
    job = start(holding, "list", max_tokens=3, n=4, cost_tokens=2 * holding.max_tokens)
    assert holding.room(0.0) is None
    for choice in range(3):
        job.take(TokenOut("list", 1, choice, 0, 97, FinishReason.STOP))
    assert holding.room(0.0) == LaneRoom(NUM_PLACES - 1, holding.max_tokens // 2)


def test_a_job_without_output_keeps_its_place(holding: Holding) -> None:
    """Also with a cap of one token: the number of steps that its prompt takes is unknown."""
    for number in range(NUM_PLACES):
        start(holding, str(number), max_tokens=1)
    assert places(holding) == 0


def test_each_choice_has_a_place(holding: Holding) -> None:
    """Three choices take three places. One that has ended takes none while the others continue."""
    job = start(holding, "three", n=3)
    assert places(holding) == NUM_PLACES - 3
    job.take(TokenOut("three", 1, 1, 0, 97))
    job.take(ChoiceEnded("three", 1, 1, FinishReason.STOP))
    assert places(holding) == NUM_PLACES - 2


def test_nothing_is_claimed_while_a_sequence_waits_in_the_engine(holding: Holding) -> None:
    """However many places are free: sequences claimed earlier go first."""
    start(holding, "one")
    holding.engine.load = EngineLoad(1, 1, 0, 0, 0.0)
    assert places(holding) == 0


TERMS = {
    "interactive": Lane("interactive", 0, min_share=0.0),
    "standard": Lane("standard", 1, min_share=0.0),
    "scoring": Lane("scoring", 1, min_share=0.0),
    "batch": Lane("batch", 2, min_share=0.2),
}


def places_of(
    holding: Holding, now_s: float = 0.0, terms: Mapping[str, Lane] | None = None
) -> dict[str, int]:
    """The places for jobs of any tenant."""
    rooms = holding.rooms(terms or TERMS, now_s)
    return {name: room.max_jobs for name, room in rooms.items() if room.fair is None}


_URGENT = ("interactive", "standard", "scoring")


@pytest.mark.parametrize(
    ("batch", "standard", "interactive", "expected"),
    [
        # Batch keeps one of four places, its guaranteed share. A lane takes none from a lane of
        # equal priority.
        (4, 0, 0, dict.fromkeys(_URGENT, 3)),
        (4, 1, 0, dict.fromkeys(_URGENT, 2)),
        # The engine would take batch's last place before those of standard, which has no share.
        # So none is claimed until batch holds none.
        (1, 3, 0, {}),
        (0, 4, 0, {"interactive": 4}),
        # A flood displaces down to the share and no further. It cannot be displaced.
        (4, 0, 2, dict.fromkeys(_URGENT, 1)),
        (4, 0, 3, {}),
        (3, 0, 1, dict.fromkeys(_URGENT, 2)),
    ],
)
def test_an_urgent_lane_has_the_places_of_less_urgent_ones(
    holding: Holding, batch: int, standard: int, interactive: int, expected: dict[str, int]
) -> None:
    """Also of jobs that were moved to another lane."""
    jobs = [
        start(holding, str(number), lane="batch")
        for number in range(batch + standard + interactive)
    ]
    for number, job in enumerate(jobs[batch:]):
        job.lane = "standard" if number < standard else "interactive"
    assert places_of(holding) == expected


def test_lanes_of_equal_priority_are_not_displaced_if_one_has_a_share(holding: Holding) -> None:
    """The engine might take all places from the lane with the share."""
    terms = {
        "interactive": Lane("interactive", 0, min_share=0.0),
        "a": Lane("a", 1, min_share=0.25),
        "b": Lane("b", 1, min_share=0.0),
    }
    for lane in "aabb":
        start(holding, str(len(holding.jobs)), lane=lane)
    assert places_of(holding, terms=terms) == {}
    for job in list(holding.jobs.values())[:2]:
        job.lane = "b"
    assert list(places_of(holding, terms=terms)) == ["interactive"]


@pytest.mark.parametrize(("share", "num_kept"), [(0.0, 0), (0.2, 1), (0.25, 2), (0.3, 2)])
def test_a_share_is_rounded_up_to_more_than_its_places(
    holding: Holding, share: float, num_kept: int
) -> None:
    """Also if it is a whole number of places: with exactly those it could never catch up."""
    for number in range(NUM_PLACES):
        start(holding, str(number), lane="batch")
    terms = {
        "interactive": Lane("interactive", 0, min_share=0.0),
        "batch": Lane("batch", 2, min_share=share),
    }
    assert holding.rooms(terms, 0.0)["interactive"].max_jobs == NUM_PLACES - num_kept


def test_owed_places_are_filled_first_if_nothing_can_be_displaced(holding: Holding) -> None:
    """Batch gets only its guaranteed places, standard gets places only while batch holds none, and
    interactive, which cannot be displaced, gets all."""
    terms = TERMS | {"standard": Lane("standard", 1, min_share=0.4)}
    start(holding, "urgent", lane="interactive")
    first = {name: room.max_owed for name, room in holding.rooms(terms, 0.0).items()}
    assert first == {"interactive": NUM_PLACES, "standard": 2, "scoring": 0, "batch": 1}
    start(holding, "batch", lane="batch")
    then = {name: room.max_owed for name, room in holding.rooms(terms, 0.0).items()}
    assert then == dict.fromkeys(("interactive", "standard", "scoring"), NUM_PLACES) | {"batch": 0}


def test_a_displaced_job_neither_blocks_nor_attracts_others(holding: Holding) -> None:
    """While batch waits in the engine, more urgent lanes have room and batch has none. While
    standard waits, lanes of its priority have none either."""
    start(holding, "one", lane="batch")
    assert places_of(holding)["batch"] == 3
    holding.engine.load = EngineLoad(1, 1, 0, 0, 0.0, waiting_lanes=("batch",))
    assert places_of(holding) == {"interactive": 3, "standard": 3, "scoring": 3}
    holding.engine.load = EngineLoad(1, 1, 0, 0, 0.0, waiting_lanes=("batch", "standard"))
    assert places_of(holding) == {"interactive": 3}


def test_a_claim_for_a_full_lane_lists_each_tenant_s_places(holding: Holding) -> None:
    """Also while a displaced sequence of the lane waits in the engine, but not while one of a more
    urgent lane waits, which goes first."""
    for number in range(NUM_PLACES):
        start(holding, str(number))
    fair = FairRoom(NUM_PLACES, holding.max_tokens, {"t": (4, 24)})
    assert holding.rooms(TERMS, 0.0)["standard"] == LaneRoom(0, 0, fair=fair)
    start(holding, "displaces", tenant="u")
    holding.engine.load = EngineLoad(1, 1, 0, 0, 0.0, waiting_lanes=("standard",))
    fair = FairRoom(NUM_PLACES, holding.max_tokens, {"t": (4, 24), "u": (1, 6)})
    assert holding.rooms(TERMS, 0.0)["standard"] == LaneRoom(0, 0, fair=fair)
    holding.engine.load = EngineLoad(1, 1, 0, 0, 0.0, waiting_lanes=("interactive",))
    assert "standard" not in holding.rooms(TERMS, 0.0)


def test_whole_jobs_that_wait_for_a_second_are_offered(holding: Holding) -> None:
    """Not those of which a choice runs, of a lane in which none waits, that run alone or that have
    ended. One that was given back n times before waits 2ⁿ seconds."""
    engine = holding.engine
    jobs = {
        name: start(holding, name, n=2, lane=lane)
        for name, lane in (
            *(("waits", "batch"), ("runs", "batch"), ("urgent", "interactive")),
            *(("alone", "batch"), ("ended", "batch"), ("returned", "batch")),
        )
    }
    jobs["alone"].is_alone, jobs["returned"].num_returns = True, 2
    for choice in range(2):
        jobs["ended"].take(TokenOut("ended", 1, choice, 0, 97, FinishReason.LENGTH))
    engine.load = EngineLoad(1, 5, 0, 0, 0.0, waiting_lanes=("batch",))
    engine.running = frozenset(["runs"])

    def offered() -> list[str]:
        return [offer.job_id for offer in holding.offers() if offer.kind == "offer"]

    assert [offered() for _ in range(5)] == [[], *[["waits"]] * 3, ["waits", "returned"]]
    engine.running = frozenset(["waits"])
    assert offered() == ["returned"]
    engine.running = frozenset()
    assert offered() == ["runs", "returned"]
    assert offered() == ["waits", "runs", "returned"]
    engine.options = msgspec.structs.replace(
        engine.options, strategy=StrategyOptions(name="static")
    )
    assert offered() == []  # it gathers them for its next batch


def test_tokens_of_displaceable_jobs_count_as_room(holding: Holding) -> None:
    """One long batch job holds all tokens: an urgent job may have those beyond batch's share."""
    whole = holding.max_tokens
    start(holding, "long", lane="batch", cost_tokens=whole)
    assert holding.room(0.0) is None
    assert holding.rooms(TERMS, 0.0)["interactive"].max_tokens == whole - math.ceil(0.2 * whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": StrategyOptions(name="static")},
        {"lanes": (LaneOptions(name="batch", strategy=StrategyOptions(name="dynamic")),)},
    ],
)
def test_fixed_batches_are_not_displaced(holding: Holding, changes: dict[str, object]) -> None:
    """The engine admits no sequence while they run, so a claimed job would only wait."""
    holding.engine.options = msgspec.structs.replace(holding.engine.options, **changes)
    for number in range(NUM_PLACES):
        start(holding, str(number), lane="batch")
    assert places_of(holding) == {}


@pytest.mark.anyio
async def test_a_worker_without_room_does_not_ask_again_for_what_it_left(
    holding: Holding, functions: Functions, redis_server: EmbeddedRedis
) -> None:
    """It would ask at once, over and over, as the time to ask again has passed."""
    clock = Clock()
    settings = hash_worker_settings(redis_server.url)
    broker = WorkerBroker(settings, "b", clock)
    claims = Claims(settings, broker, holding, clock)

    async def taken(claimed: list[Claimed]) -> None:
        assert not claimed

    for worker in ("a", "b"):
        await beat(functions, worker)
    await run(functions, "a", job_of_residence(HELD))
    await submit(functions, job_of_residence((*HELD, 9)))
    await claims.claim_while_room(taken, lambda: False)
    assert 0 < claims.rest_s < POLL_S
    clock.now_s += 10
    holding.engine.forget()
    assert not claims.rooms()
    await claims.claim_while_room(taken, lambda: False)
    await broker.aclose()
    assert claims.rest_s > 0
