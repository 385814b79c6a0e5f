"""Drains: a worker finishes what it can, releases the rest in time, and exits."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import redis.asyncio

from contract.jobs import JobStatus
from contract.keys import Keys
from contract.roster import Roster
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions
from tests.fleet import Caller, WorkerProcess, fleet, until
from tests.workers.test_supervisor import SLOW, assert_exact, children_of, is_alive
from workers.supervisor.drain import BadNoticeSource, Drain, SpotNotice

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]


@pytest.fixture
def roster(redis_client: redis.asyncio.Redis, keys: Keys) -> Roster:
    return Roster(redis_client, keys)


@pytest.mark.parametrize(
    ("budget_s", "release_s", "running_s"), [(30, 10, 20), (12, 10, 8), (0.3, 10, 0.2), (5, 0, 5)]
)
def test_a_third_of_a_short_drain_budget_is_kept_for_releases(
    budget_s: float, release_s: float, running_s: float
) -> None:
    """Ten seconds, or less for a short budget. The budget is granted once."""
    now_s = 100.0
    drain = Drain(budget_s, release_s, lambda: now_s)
    assert drain.begin()
    assert drain.running_s == pytest.approx(running_s)
    now_s += 1000
    assert not drain.begin()
    assert (drain.running_s, drain.left_s) == (0.0, 0.0)


async def test_released_jobs_run_before_waiting_ones(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """SIGTERM: jobs that ran come before jobs that waited in the queue for longer."""
    async with fleet(redis_server.url, 1, SLOW, drain_s=0.3, engine={"max_num_seqs": 2}) as [first]:
        running = [await caller.submit(f"r{i}", max_tokens=200) for i in range(2)]
        for job in running:
            await caller.has_output(job, 3)
        waiting = await caller.submit("w", max_tokens=5)
        assert await first.stop() == 0
        assert {(await caller.view(job)).status for job in running} == {JobStatus.QUEUED}
    claimed = await caller.functions.claim(
        "w2", "m", ("standard",), lease_s=10, max_jobs=9, max_tokens=10**6
    )
    assert [job.job.id for job in claimed] == [job.id for job in (*running, waiting)]
    assert [job.attempt for job in claimed] == [1, 1, 1]


async def order_drain(roster: Roster, worker: WorkerProcess) -> str:
    """Orders the only worker to drain; returns its incarnation."""
    [view] = await roster.workers(["m"])
    assert str(worker.pid) in view.incarnation
    assert await roster.drain([view.incarnation]) == [True]
    return view.incarnation


async def test_a_worker_drains_on_an_order_through_redis(
    caller: Caller, roster: Roster, redis_server: EmbeddedRedis
) -> None:
    """It claims no more jobs, gateways no longer count it, its job ends, and it exits."""
    async with fleet(redis_server.url, 1, SLOW, drain_s=30.0) as [worker]:
        job = await caller.submit("short", max_tokens=60)
        await caller.has_output(job, 2)
        incarnation = await order_drain(roster, worker)

        async def is_draining() -> bool:
            view = await roster.worker(incarnation)
            return view is not None and view.is_draining

        await until(is_draining)
        assert await roster.workers(["m"]) == []
        late = await caller.submit("late")
        assert_exact(job, await caller.answer(job), SLOW)
        assert await asyncio.to_thread(worker.wait, 20) == 0
        assert await roster.worker(incarnation) is None
        assert (await caller.view(late)).status is JobStatus.QUEUED
        assert await roster.drain([incarnation]) == [False]


async def test_a_missed_drain_order_is_found_by_the_heartbeat(
    caller: Caller, roster: Roster, redis_server: EmbeddedRedis, keys: Keys
) -> None:
    """The message is only a hint; the order stays in the worker's record."""
    async with fleet(redis_server.url, 1, drain_s=1.0) as [worker]:
        await caller.num_workers(1)
        [view] = await roster.workers(["m"])
        await caller.client.hset(keys.of("worker", view.incarnation), "order", "drain")
        assert await asyncio.to_thread(worker.wait, 20) == 0


async def test_a_notice_in_a_file_drains(
    caller: Caller, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """The machine will be shut down: the job is released, and no attempt is counted."""
    notice = tmp_path / "notice"
    settings = {"drain_s": 0.3, "spot_notice": str(notice)}
    async with fleet(redis_server.url, 1, SLOW, **settings) as [worker]:
        job = await caller.submit("long", max_tokens=300)
        await caller.has_output(job, 3)
        notice.touch()
        assert await asyncio.to_thread(worker.wait, 20) == 0
        view = await caller.view(job)
        assert (view.status, view.attempt) == (JobStatus.QUEUED, 0)


async def test_a_signal_to_the_whole_group_kills_no_job(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """Some service managers send SIGTERM to every process: only the supervisor obeys."""
    async with fleet(redis_server.url, 1, SLOW, drain_s=30.0) as [worker]:
        job = await caller.submit("go on", max_tokens=60)
        await caller.has_output(job, 3)
        children = children_of(worker.pid)
        worker.terminate_group()
        assert_exact(job, await caller.answer(job), SLOW)
        assert await asyncio.to_thread(worker.wait, 20) == 0
        crashes = await caller.client.hget(caller.keys.of("job", job.id), "crashes")
        assert (crashes, (await caller.view(job)).attempt) == (b"0", 1)
        assert not any(map(is_alive, children))


async def test_a_worker_exits_within_its_budget_without_redis(keys: Keys) -> None:
    """It cannot release its job and does not wait forever: the lease will expire."""
    with EmbeddedRedis() as server:
        async with fleet(server.url, 1, HashModelOptions(), drain_s=2.0) as [worker]:

            async def is_up() -> bool:
                client = redis.asyncio.Redis.from_url(server.url)
                async with client:
                    return bool(await client.zcard(keys.of("workers", "m")))

            await until(is_up)
            server.kill()
            # Wall time with a large margin: the budget is 2 s, otherwise the test waits forever.
            assert await worker.stop(timeout_s=60) == 0


class Metadata(BaseHTTPRequestHandler):
    """Answers as EC2 does: only with a token, and 404 until there is a notice."""

    token = "t0ken"
    has_notice = threading.Event()
    was_asked = threading.Event()

    def do_PUT(self) -> None:
        assert self.path == "/latest/api/token"
        self._answer(200, self.token)

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != self.token:
            return self._answer(401, "")
        self.was_asked.set()
        return self._answer(200 if self.has_notice.is_set() else 404, "{}")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@pytest.fixture
def metadata_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/latest/meta-data/spot/instance-action"
        server.shutdown()
        thread.join()


async def test_a_notice_on_http_is_found(metadata_url: str) -> None:
    """404 is no notice, 200 is one. A token is fetched if the service requires one."""
    waiting = asyncio.create_task(SpotNotice(metadata_url, poll_s=0.01).wait())
    await asyncio.to_thread(Metadata.was_asked.wait, 20)
    assert not waiting.done()
    Metadata.has_notice.set()
    await asyncio.wait_for(waiting, 20)


@pytest.mark.parametrize("source", ["https://x/y", "ftp://x", "http:///path"])
def test_an_unwatchable_notice_is_refused(source: str) -> None:
    """Before the worker starts."""
    with pytest.raises(BadNoticeSource):
        SpotNotice(source)
