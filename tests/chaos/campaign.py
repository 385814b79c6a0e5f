"""One campaign: a fleet, its callers and faults, then a time without faults, and the checks."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import redis.asyncio

from contract.connection import end_tasks
from contract.errors import BatchwayError
from contract.functions import Functions
from contract.jobs import Endpoint, Job, JobStatus, SamplingParams
from contract.keys import Keys, partition_of
from infra.embedded_redis import Fsync
from tests.callbacks.receiver import Answer, Receiver, always, half_of_the_time
from tests.chaos.batches import KILLS, Batcher, BatchOracle
from tests.chaos.callers import Callers, Client
from tests.chaos.clients import Browser, Canceller, Leaver, Messenger, Streamer, Submitter
from tests.chaos.deliveries import Delivery, check_deliveries
from tests.chaos.faults import CLUSTER_KINDS, VLLM_KINDS, Injector
from tests.chaos.fleet import Fleet, FleetOptions
from tests.chaos.flows import MODELS_YAML, FlowOracle, check_calls
from tests.chaos.ledger import Kind, Ledger, Violation
from tests.chaos.mistakes import Mistake
from tests.chaos.oracles import OPENINGS, DemoOracle, HashOracle, Oracle
from tests.chaos.parts import NAMESPACE
from tests.chaos.report import Report
from tests.clock import clock_of, library_with_test_clock
from tests.cluster import plain_client
from tests.fakes import encode_text
from tests.fleet import until
from tests.oracle.audit import Audit
from tests.vllm_environment import interpreter
from workers.settings import VLLM_ENGINE

_REST_TIMEOUT_S = 240.0  # for all that was begun to end, once nothing is disturbed any more
_PROGRESS_S = 5.0
_LOOK_S = 0.2
_TOLD = (b"delivered", b"dead")
_RETENTION_MS = 8 * 24 * 3600 * 1000  # longer than any job is kept
_SWEEP_JOBS = 1000
_MAX_SWEEPS = 50
_NUM_QUESTIONS = 6  # of the demo model
CALLERS: Mapping[type[Client], int] = {
    **{Streamer: 6, Submitter: 3, Canceller: 2, Leaver: 1},
    **{Messenger: 2, Browser: 2},
}
FEW_CALLERS: Mapping[type[Client], int] = {Streamer: 3, Submitter: 1, Canceller: 1, Leaver: 1}
FLOW_CALLERS: Mapping[type[Client], int] = {Streamer: 10, Submitter: 10, Canceller: 2, Leaver: 1}
BATCH_CALLERS: Mapping[type[Client], int] = {Batcher: 1}
_DEMO_WORKER: Mapping[str, Any] = {
    "served_model_name": "demo",
    "engine_module": "workers.engine_process.engine_loop",
    "engine": {"model_path": "infra/demo_model", "num_threads": 1, "kv_memory_bytes": 2**26},
}
_VLLM_WORKER: Mapping[str, Any] = {
    "served_model_name": "demo",
    "engine_module": VLLM_ENGINE,
    "engine_python": str(interpreter()),
    "engine": {
        "model_path": "infra/demo_model",
        "dtype": "float32",
        "kv_memory_bytes": 2**26,
        "max_num_seqs": 32,
        "engine_args": {"enforce_eager": "true"},
    },
}
_WORKERS: Mapping[str, Mapping[str, Any]] = {
    "hash": {},
    "demo": _DEMO_WORKER,
    "vllm": _VLLM_WORKER,
}


@dataclass(frozen=True, slots=True)
class CampaignOptions:
    """The number and rate of faults, the server, and the number of callers of each kind."""

    num_faults: int
    seed: int = 1
    model: str = "hash"  # or demo, or vllm: the demo model on vLLM
    fsync: Fsync = "always"
    mean_gap_s: float = 0.4  # between two faults
    callers: Mapping[type[Client], int] = field(default_factory=lambda: CALLERS)
    keeps_logs: bool = False
    kinds: Sequence[str] = ()  # of faults; (): all
    mistake: Mistake = Mistake.NONE
    flows: bool = False  # the hash model is called through flows
    batch_lines: int = 0  # of the file that BATCH_CALLERS run as a batch
    stops_at_violation: bool = False
    fleet: FleetOptions = field(default_factory=FleetOptions)


async def run_campaign(options: CampaignOptions, say: Callable[[str], None] = print) -> Report:
    """Runs until the end or until cancelled. Leaves no process behind."""
    rng = random.Random(options.seed)
    async with Fleet(_fleet_options(options), rng) as fleet, _receiver(options) as receiver:
        fleet.keeps_logs = options.keeps_logs
        ledger = _ledger(options, fleet)
        oracle = await _oracle(options, fleet, rng)
        callers = Callers(
            fleet.gateway_urls,
            oracle,
            ledger,
            [receiver.url(path) for path in receiver.behaviours],
            fleet.api_keys,
        )
        injector = Injector(fleet, rng, options.mean_gap_s, _kinds(options))
        say(f"fleet is up: logs in {fleet.directory}")
        async with _progress(say, options, injector, ledger), callers.http:
            if options.batch_lines:
                await Batcher(callers, 0, options.seed).prepare()
            await _disturb(options, callers, injector)
            say("faults are over: all that was begun must end")
            await _rest(fleet)
            await _reckon(options, fleet, ledger, callers, receiver)
        if ledger.violations and not options.mistake:
            fleet.keeps_logs = True
            say(f"violations: logs are kept in {fleet.directory}")
        num_lost = fleet.cluster.num_bytes_lost if fleet.cluster else injector.num_bytes_lost
        return Report(options, injector.counts, num_lost, ledger)


def _ledger(options: CampaignOptions, fleet: Fleet) -> Ledger:
    """With the cuts that may have lost what was acknowledged."""
    ledger = Ledger(has_hidden_events=options.flows)
    if (cluster := fleet.cluster) is None:
        ledger.cuts_s = fleet.redis.cuts_s if options.fsync == "everysec" else ()
    elif not options.fleet.awaits:
        ledger.cuts_s = cluster.cuts
        ledger.is_struck = lambda cut, job_id: cluster.is_struck(cut, partition_of(job_id))
    return ledger


def _fleet_options(options: CampaignOptions) -> FleetOptions:
    worker = _WORKERS[options.model]
    return replace(
        options.fleet,
        fsync=options.fsync,
        worker=worker,
        mistake=options.mistake,
        models=MODELS_YAML if options.flows else "",
    )


def _kinds(options: CampaignOptions) -> Sequence[str]:
    if options.batch_lines:
        return options.kinds or KILLS
    if options.fleet.num_partitions:
        return options.kinds or CLUSTER_KINDS
    return options.kinds or (VLLM_KINDS if options.model == "vllm" else ())


def _receiver(options: CampaignOptions) -> Receiver:
    """Two receivers in one: the first accepts all messages, the second refuses half of them."""
    rng = random.Random(f"{options.seed} receiver")
    return Receiver({"/well": always(Answer()), "/half": half_of_the_time(rng)})


async def _oracle(options: CampaignOptions, fleet: Fleet, rng: random.Random) -> Oracle:
    hash_model = options.fleet.hash_model
    oracle: Oracle = FlowOracle(hash_model) if options.flows else HashOracle(hash_model)
    if options.model != "hash":
        url = fleet.gateway_urls()[0]
        oracle = await DemoOracle.ask_undisturbed(url, rng, _NUM_QUESTIONS)
    return BatchOracle(oracle, rng, options.batch_lines) if options.batch_lines else oracle


async def _disturb(options: CampaignOptions, callers: Callers, injector: Injector) -> None:
    """Inflicts the faults; then callers finish their stories."""
    clients = [
        asyncio.create_task(kind(callers, number, options.seed).run())
        for kind, count in options.callers.items()
        for number in range(count)
    ]
    faults = asyncio.create_task(injector.run(options.num_faults))
    warming = asyncio.create_task(_warm(options, injector.fleet, callers.ledger))
    waited = {*clients, faults, warming, injector.fleet.failed}
    try:
        while not faults.done():
            done, _ = await asyncio.wait(
                waited, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()  # no client ends before the faults do
            injector.is_over = options.stops_at_violation and bool(callers.ledger.violations)
        callers.is_over.set()
        await asyncio.gather(*clients)
    finally:
        await end_tasks(faults, warming, *clients)


async def _warm(options: CampaignOptions, fleet: Fleet, ledger: Ledger) -> None:
    """Leaves likely prompts to workers, which hold their beginnings."""
    rng, keys = random.Random(f"{options.seed} warm"), Keys(NAMESPACE)
    asked = Job(
        id="", tenant="default", model=HashOracle.model, lane="standard", created_s=0,
        endpoint=Endpoint.CHAT, prompt_ids=(), params=SamplingParams(max_tokens=1, seed=0),
    )  # fmt: skip
    while options.model == "hash" and fleet.cluster is None:
        text = f"{rng.choice(OPENINGS[2:])} {rng.randrange(10**6)} " * 2
        job = msgspec.structs.replace(asked, prompt_ids=encode_text(text))
        with contextlib.suppress(BatchwayError):
            async with fleet.observe(keys) as client:
                await Functions(client, keys).warm(job, 0, lives_s=2.0)
            ledger.counts["prompts left to workers"] += 1
        await asyncio.sleep(_LOOK_S)
    await asyncio.Event().wait()


async def _rest(fleet: Fleet) -> None:
    """I14: without faults every job ends, and every callback is delivered. Returns when this is
    done or the time limit has passed."""
    for keys in fleet.all_keys():
        async with fleet.observe(keys) as client:

            async def is_at_rest() -> bool:
                for name in ("deadlines", "leases"):
                    if await client.zcard(keys.of(name)):  # noqa: B023
                        return False
                records: Any = await client.keys(keys.of("out", "*"))  # noqa: B023
                states = {await client.hget(key, "state") for key in records}
                return states <= set(_TOLD)

            with contextlib.suppress(TimeoutError):
                await until(is_at_rest, _REST_TIMEOUT_S)


async def _reckon(
    options: CampaignOptions, fleet: Fleet, ledger: Ledger, callers: Callers, receiver: Receiver
) -> None:
    """Compares all logs with the expected and the received output, and delivered callbacks with the
    ends of jobs. Audits Redis."""
    has_key, statuses = dict[str, bool](), dict[str, JobStatus]()
    async with contextlib.AsyncExitStack() as stack:
        places = [
            (keys, await stack.enter_async_context(fleet.observe(keys)))
            for keys in fleet.all_keys()
        ]
        for keys, client in places:
            has_key |= await _jobs_of(options, ledger, callers.oracle, client, keys)
        ledger.check_jobs(has_key)
        for keys, client in places:
            functions = Functions(client, keys)
            for job_id in sorted(has_key.keys() & ledger.stories_by_job.keys()):
                if partition_of(job_id) != keys.partition:
                    continue
                tenant: Any = await client.hget(keys.of("job", job_id), "tenant")
                read = await functions.read(job_id, tenant.decode(), max_events=100_000)
                assert read is not None
                view, entries = read
                statuses[job_id] = view.status
                ledger.check_start(job_id, view.claimed_ms)
                ledger.check_log(job_id, view.status, entries)
        check_deliveries(ledger, statuses, _deliveries(receiver), num_forged=len(receiver.forged))
        _judge_differences(ledger, callers.oracle)
        for keys, client in places:
            await _audit(ledger, fleet, client, keys)


async def _jobs_of(
    options: CampaignOptions,
    ledger: Ledger,
    oracle: Oracle,
    client: redis.asyncio.Redis,
    keys: Keys,
) -> dict[str, bool]:
    """The jobs of a partition without those that others have made, and whether they have a key."""
    prefix = keys.of("job", "")
    found: Any = await client.keys(f"{prefix}*")
    # A call without a key needs a connected caller; the oracle's questions are such calls too.
    has_key = {
        key.decode()[len(prefix) :]: await client.hget(key, "attendance") == b"0" for key in found
    }
    parts = {job_id: await client.hget(keys.of("job", job_id), "part") for job_id in has_key}
    children = {job_id for job_id, part in parts.items() if part in (b"child", b"nested")}
    if isinstance(oracle, BatchOracle):  # jobs that a killed feeder has not deleted
        children |= oracle.line_job_ids
    for job_id in children:
        has_key.pop(job_id, None)
    if options.flows:
        flows_within = {job_id for job_id, part in parts.items() if part == b"nested"}
        functions = Functions(client, keys)
        await check_calls(ledger, functions, sorted({*has_key, *flows_within}), children)
    return has_key


async def _audit(ledger: Ledger, fleet: Fleet, client: redis.asyncio.Redis, keys: Keys) -> None:
    retyped: Any = await client.hget(keys.of("corrections"), "type")
    if retyped:
        detail = f"{retyped.decode()} keys had another type"
        ledger.violations.append(Violation(Kind.LOST, "audit", detail))
    with plain_client(fleet.redis_url, keys) as sync_client:
        audit = Audit(sync_client, keys)
        try:
            await asyncio.to_thread(audit.check_all_ended)
            await _outlive_retention(Functions(client, keys), client, keys)
            await asyncio.to_thread(audit.check_at_rest)
        except AssertionError as broken:
            detail = f"partition {keys.partition}: {broken}"[:500]
            ledger.violations.append(Violation(Kind.LOST, "audit", detail))


def _deliveries(receiver: Receiver) -> list[Delivery]:
    deliveries = ((message, message.body["data"]) for message in receiver.messages)
    return [
        Delivery(data["id"], message.id, data["status"], message.was_accepted)
        for message, data in deliveries
    ]


async def _outlive_retention(functions: Functions, client: redis.asyncio.Redis, keys: Keys) -> None:
    """Advances the clock of Redis until every record has expired, and sweeps."""
    await client.set(clock_of(keys.partition), _RETENTION_MS)
    for _ in range(_MAX_SWEEPS):
        # Each time, because workers load the library again where it is not theirs.
        await client.function_load(library_with_test_clock(), replace=True)
        await functions.sweep(_SWEEP_JOBS)
        if not await client.zcard(keys.of("kept")):
            return


def _judge_differences(ledger: Ledger, oracle: Oracle) -> None:
    """A real model may have taken the other token of a near-tie, and no other token."""
    for story in ledger.stories:
        if not story.is_diverged:
            continue
        is_whole = story.status == JobStatus.SUCCEEDED
        if oracle.is_right(story.asked, story.output, is_whole=is_whole):
            ledger.num_near_ties += 1
        else:
            story.violate(Kind.WRONG, "not a near-tie")


@contextlib.asynccontextmanager
async def _progress(
    say: Callable[[str], None], options: CampaignOptions, injector: Injector, ledger: Ledger
) -> AsyncIterator[None]:
    """Prints the progress every few seconds."""

    async def print_progress() -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            say(
                f"{injector.num_done}/{options.num_faults} faults, {len(ledger.stories)} requests, "
                f"{len(ledger.violations)} violations"
            )

    task = asyncio.create_task(print_progress())
    try:
        yield
    finally:
        await end_tasks(task)
