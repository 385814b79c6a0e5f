"""A Redis whose memory or disk is full accepts no new jobs, but running jobs end normally."""

import contextlib
import resource
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import redis.asyncio

from contract.connection import connect
from contract.errors import BrokerFull, BrokerUnavailable, JobRefused
from contract.function_types import Append
from contract.functions import Functions
from contract.jobs import Job, JobStatus
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis, find_server
from tests.contract.some_calls import claim, make_job, make_submission, tokens
from tests.fleet import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def small_redis(keys: Keys) -> AsyncIterator[redis.asyncio.Redis]:
    """A server whose maxmemory may be set."""
    with EmbeddedRedis() as server:
        client = connect(server.url, keys)
        await ensure_library(client)
        yield client
        await client.aclose()


async def fill(client: redis.asyncio.Redis, share: float) -> None:
    """Sets maxmemory so that the memory in use is this fraction of it."""
    used = (await client.info("memory"))["used_memory"]
    await client.config_set("maxmemory", int(used / share))


async def submit_until_full(functions: Functions, most: int = 17) -> list[Job]:
    """Submits; the last of the jobs was refused. By an older reading sixteen are accepted."""
    jobs: list[Job] = []
    for _ in range(most):
        jobs.append(make_job())
        try:
            await functions.submit(jobs[-1], make_submission())
        except BrokerFull as full:
            if full.code == "memory_full":
                return jobs
            raise
    raise AssertionError(f"{most} jobs were accepted")


async def until_taken(functions: Functions) -> None:
    """Returns once a job is accepted."""

    async def is_taken() -> bool:
        with contextlib.suppress(BrokerFull):
            return (await functions.submit(make_job(), make_submission())).is_new
        return False

    await until(is_taken)


async def test_jobs_are_refused_before_memory_is_full(
    small_redis: redis.asyncio.Redis, keys: Keys
) -> None:
    """Above 80%, a new job is refused after at most sixteen that were admitted by an older reading.
    A repeated submit still gets its job, and a call of a flow that was accepted is admitted. Below
    80%, jobs are admitted again."""
    functions = Functions(small_redis, keys)
    known = make_job()
    await functions.submit(known, make_submission())

    await fill(small_redis, 0.99)  # not nearer to 80%: Redis frees some of what it counts
    await submit_until_full(functions)
    assert not (await functions.submit(known, make_submission())).is_new
    of_a_flow = msgspec.structs.replace(make_job(), parent=known.id)
    assert (await functions.submit(of_a_flow, make_submission())).is_new

    await fill(small_redis, 0.7)
    await until_taken(functions)


async def test_jobs_are_refused_before_anything_is_evicted(
    small_redis: redis.asyncio.Redis, keys: Keys
) -> None:
    """Where the server would evict what has a time to live, as ElastiCache Serverless does."""
    functions = Functions(small_redis, keys)
    await small_redis.config_set("maxmemory-policy", "volatile-lru")
    await fill(small_redis, 0.5)
    number = 0

    async def submit_until_refused() -> None:
        nonlocal number
        for number in range(100_000):
            terms = make_submission(idempotency_key=f"key-{number}", body_hash="hash")
            await functions.submit(make_job(), terms)

    with pytest.raises((BrokerFull, JobRefused)):
        await submit_until_refused()
    assert number > 20
    assert (await small_redis.info("stats"))["evicted_keys"] == 0
    names = [key async for key in small_redis.scan_iter(match=keys.of("idem", "*"))]
    assert len(names) == number


async def test_running_jobs_end_although_memory_is_full(
    small_redis: redis.asyncio.Redis, keys: Keys
) -> None:
    """Above maxmemory itself: submits change nothing, and all other functions work."""
    functions = Functions(small_redis, keys)
    jobs = [make_job() for _ in range(4)]
    for job in jobs:
        await functions.submit(job, make_submission())
    first, second, *_ = await claim(functions, max_jobs=2)
    await fill(small_redis, 1.2)

    late = await submit_until_full(functions)
    assert await functions.read(late[-1].id, "t") is None
    for job in late[:-1]:
        await functions.cancel(job.id, "t")
    event = tokens(0, 1, 2)
    item = Append(first.job.id, first.epoch, 1, event, 2, JobStatus.SUCCEEDED)
    assert await functions.append("w1", [item], lease_s=10.0) == [("OK", 3)]
    assert await functions.heartbeat("w1", "m", [], lease_s=10.0, info="{}") == []
    assert await functions.cancel(second.job.id, "t") is JobStatus.CANCELLED
    assert len(await claim(functions, "w2")) == 2
    assert (await functions.sweep()).num_lapsed == 0
    found = await functions.read(first.job.id, "t", max_events=9)
    assert found is not None
    assert [entry.number for entry in found[1]] == [1, 2]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A server that writes an append-only file and survives a failed write. Yields its URL and
    process id."""
    if not hasattr(resource, "prlimit"):
        pytest.skip("a disk is made full by a limit on another process, which is Linux's")
    url = tmp_path / "r.sock"
    settings = {"port": "0", "unixsocket": url, "dir": tmp_path, "save": "", "appendonly": "yes"}
    arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    server = subprocess.Popen(
        [find_server(), *arguments],
        stdout=subprocess.DEVNULL,
        restore_signals=False,  # SIGXFSZ stays ignored: the write fails, the process survives
    )
    try:
        yield f"unix://{url}", server.pid
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()


async def test_a_full_disk_refuses_jobs_and_can_be_read(
    full_disk: tuple[str, int], keys: Keys
) -> None:
    """The append-only file cannot grow: submits report this, and reads work. With free space
    everything works again."""
    url, pid = full_disk
    client = connect(url, keys)

    async def is_up() -> bool:
        with contextlib.suppress(BrokerUnavailable):
            await ensure_library(client)
            return True
        return False

    await until(is_up)
    functions = Functions(client, keys)
    job = make_job()
    await functions.submit(job, make_submission())

    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    async def is_refused() -> bool:  # the write that fails first was answered before it
        try:
            await functions.submit(make_job(), make_submission())
        except BrokerFull as full:
            return full.code == "disk_full"
        return False

    await until(is_refused)
    found = await functions.read(job.id, "t")
    assert found is not None
    assert found[0].status is JobStatus.QUEUED

    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    await until_taken(functions)
    await client.aclose()
