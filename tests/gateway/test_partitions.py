"""Several partitions: jobs run where their tenants live, and every list and count has all.

Over 300 lines: one gateway, asked about all that partitions share.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.api_keys import ApiKeys, KeyTerms, Scope
from contract.ids import partition_of
from contract.keys import Keys
from contract.partitions import Ask, Homes, PartitionMap, move_tenant, open_partitions
from contract.shards import OpenShards, Shard, Shards
from infra.cli import main
from infra.embedded_redis import EmbeddedRedis
from infra.partitions_command import EXIT_LEFT
from tests.fakes import HashModelOptions
from tests.fleet import WorkerProcess, until
from tests.gateway.conftest import make_settings, running_gateway

pytestmark = pytest.mark.anyio

NUM_PARTITIONS = 4
TENANTS = [f"tenant{number}" for number in range(12)]
BODY = {"model": "m", "prompt": "hello", "max_tokens": 4}
JOB = {"endpoint": "/v1/completions", "body": BODY}


@pytest.fixture
async def shards(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis
) -> AsyncIterator[OpenShards]:
    """All partitions of an empty server or cluster, called as nobody's gateway."""
    async with OpenShards(redis_server.url, "test") as found:
        yield found


@pytest.fixture
def ask(shards: OpenShards) -> Ask:
    return shards.ask


@pytest.fixture
async def known(ask: Ask) -> PartitionMap:
    return await open_partitions(ask, NUM_PARTITIONS)


class Callers:
    """Clients of two gateways, with a key for each tenant."""

    def __init__(self, first: httpx.AsyncClient, second: httpx.AsyncClient) -> None:
        self.gateways = first, second
        self.keys: dict[str, str] = {}

    async def call(
        self, tenant: str, method: str, path: str, gateway: int = 0, **terms: Any
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys[tenant]}", **terms.pop("headers", {})}
        return await self.gateways[gateway].request(method, path, headers=headers, **terms)

    async def submit(self, tenant: str, gateway: int = 0, **headers: str) -> str:
        answer = await self.call(tenant, "POST", "/v1/jobs", gateway, json=JOB, headers=headers)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    async def until_ended(self, tenant: str, job_id: str, gateway: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def has_ended() -> bool:
            answer = await self.call(tenant, "GET", f"/v1/jobs/{job_id}", gateway)
            assert answer.status_code == 200, answer.text
            found.update(answer.json())
            return found["status"] not in ("queued", "running")

        await until(has_ended)
        return found


@pytest.fixture
def bounds() -> dict[str, int]:
    """Settings of the gateways; tests override it."""
    return {}


@pytest.fixture
def gateway_urls(
    redis_server: EmbeddedRedis, known: PartitionMap, bounds: dict[str, int]
) -> Iterator[list[str]]:
    settings = make_settings(
        redis_server.url, partitions=NUM_PARTITIONS, lane_bound_s=0.0, **bounds
    )
    with running_gateway(settings) as first, running_gateway(settings) as second:
        yield [first, second]


@pytest.fixture
async def callers(
    redis_client: redis.asyncio.Redis, gateway_urls: list[str]
) -> AsyncIterator[Callers]:
    api_keys = ApiKeys(redis_client, Keys("test"), None)
    first, second = gateway_urls
    async with (
        httpx.AsyncClient(base_url=first, timeout=20) as one,
        httpx.AsyncClient(base_url=second, timeout=20) as other,
    ):
        found = Callers(one, other)
        for tenant in TENANTS:
            found.keys[tenant], _ = await api_keys.create(KeyTerms(tenant=tenant))
        admin = KeyTerms(tenant="boss", scopes=(Scope.ADMIN,))
        found.keys["boss"], _ = await api_keys.create(admin)
        yield found


@contextlib.asynccontextmanager
async def serving(
    redis_server: EmbeddedRedis, callers: Callers, **settings: Any
) -> AsyncIterator[WorkerProcess]:
    """A worker that both gateways know and that serves all partitions."""
    worker = WorkerProcess(redis_server.url, HashModelOptions(), **settings)

    async def is_served(gateway: int) -> bool:
        return (await callers.call("boss", "GET", "/v1/models/m", gateway)).status_code == 200

    try:
        for gateway in (0, 1):
            await until(lambda: is_served(gateway))  # noqa: B023
        yield worker
    finally:
        await worker.close()


async def pages(callers: Callers, path: str, **query: str) -> list[str]:
    """The ids of all pages, read from the gateways in turn."""
    found, after, gateway = list[str](), "", 0
    while True:
        terms = {**query, **({"after": after} if after else {})}
        page = (await callers.call("boss", "GET", path, gateway, params=terms)).json()
        found += [row["id"] for row in page["data"]]
        if not page["has_more"]:
            return found
        after, gateway = page["last_id"], 1 - gateway


async def test_jobs_run_where_their_tenants_live_and_an_admin_sees_all(
    redis_server: EmbeddedRedis, callers: Callers, known: PartitionMap
) -> None:
    """One worker serves all partitions; either gateway finds each job, and lists them all."""
    async with serving(redis_server, callers):
        ids = [await callers.submit(tenant) for tenant in TENANTS]
        assert [partition_of(job_id) for job_id in ids] == [known.choose(t) for t in TENANTS]
        assert len({partition_of(job_id) for job_id in ids}) == NUM_PARTITIONS
        for tenant, job_id in zip(TENANTS, ids, strict=True):
            ended = await callers.until_ended(tenant, job_id, gateway=1)
            assert ended["status"] == "succeeded"
        answer = await callers.call(TENANTS[0], "POST", "/v1/completions", 1, json=BODY)
        assert answer.status_code == 200, answer.text
        listed = await pages(callers, "/v1/jobs", tenant="*", limit="5")
        assert listed[1:] == ids[::-1]
        assert listed[0] == answer.headers["x-job-id"]
        metrics = (await callers.call("boss", "GET", "/metrics")).text
        counted = [line for line in metrics.splitlines() if "batchway_requests_total{" in line]
        assert sum(float(line.split()[-1]) for line in counted) == len(TENANTS) + 1


async def test_a_tenant_moves_while_it_submits(
    redis_server: EmbeddedRedis, callers: Callers, known: PartitionMap, ask: Ask
) -> None:
    """Between any two calls: no job is lost or doubled, keys of idempotency hold, what was
    submitted before ends where it is, and the tenant's list has all."""
    tenant = TENANTS[0]
    ids, keys = list[str](), dict[str, str]()
    async with serving(redis_server, callers):
        for turn in range(24):
            if turn % 3 == 2:
                home = await move_tenant(ask, tenant, turn // 3 % NUM_PARTITIONS)
                assert home is not None
                assert home.number == turn // 3 % NUM_PARTITIONS
            key = f"key-{turn}"
            job_id = await callers.submit(tenant, turn % 2, **{"idempotency-key": key})
            ids.append(job_id)
            keys[key] = job_id
        assert len(set(ids)) == len(ids)
        assert len({partition_of(job_id) for job_id in ids}) == NUM_PARTITIONS
        for turn, (key, job_id) in enumerate(keys.items()):
            assert await callers.submit(tenant, turn % 2, **{"idempotency-key": key}) == job_id
        for job_id in ids:
            assert (await callers.until_ended(tenant, job_id))["status"] == "succeeded"
        listed, after = list[str](), ""
        while True:
            terms = {"limit": "5", **({"after": after} if after else {})}
            page = (await callers.call(tenant, "GET", "/v1/jobs", 1, params=terms)).json()
            listed += [row["id"] for row in page["data"]]
            if not page["has_more"]:
                break
            after = page["last_id"]
        assert sorted(listed) == sorted(ids)


async def test_an_id_of_a_new_partition_leads_there_at_once(
    redis_server: EmbeddedRedis, known: PartitionMap
) -> None:
    """For a gateway that has just started with one partition, and for one that has just read the
    map."""
    started = Shards(lambda number: Shard(redis_server.url, "test", number))
    async with contextlib.aclosing(started), OpenShards(redis_server.url, "test") as reader:
        for gateway, number in ((started, 3), (reader, 4)):
            await gateway.current()
            if number not in known.entries:
                assert await partitions(redis_server, "add") == 0
            assert (await gateway.of(f"job-{number}-{'0' * 32}")).number == number


async def test_limits_hold_while_a_tenant_moves(
    callers: Callers, ask: Ask, redis_client: redis.asyncio.Redis
) -> None:
    """Two gateways with different maps together admit no more than one would."""
    api_keys = ApiKeys(redis_client, Keys("test"), None)
    terms = KeyTerms(tenant="limited", requests_per_minute=6)
    callers.keys["limited"], _ = await api_keys.create(terms)
    codes = Counter[int]()
    for turn in range(24):
        if turn % 4 == 1:
            await move_tenant(ask, "limited", turn // 4 % NUM_PARTITIONS)
        answer = await callers.call("limited", "POST", "/v1/completions", turn % 2, json=BODY)
        codes[answer.status_code] += 1
    assert codes[429] == 24 - 6, codes  # 404 within the limit: nobody serves the model


@pytest.mark.parametrize("bounds", [{"lane_bound_tokens": 400}])
async def test_a_full_partition_gets_the_room_of_others(
    redis_server: EmbeddedRedis,
    callers: Callers,
    shards: OpenShards,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A quarter of the lane's bound is its part; what it gets more is logged, and what waits in all
    partitions stays within the bound of both gateways."""
    caplog.set_level("INFO", logger="batchway.gateway")
    monkeypatch.setattr("gateway.redis.shards.PERIOD_S", 0.1)
    async with serving(redis_server, callers):
        pass  # the model is known, and nobody serves it
    tenant, codes = TENANTS[0], Counter[int]()

    async def has_more() -> bool:
        turn = codes.total()
        answer = await callers.call(tenant, "POST", "/v1/jobs", turn % 2, json=JOB)
        codes[answer.status_code] += 1
        waiting = [
            await shard.client.hget(shard.keys.of("counters", "m", "standard"), "queued_tokens")
            for shard in await shards.all()
        ]
        assert sum(int(num or 0) for num in waiting) <= 400
        return max(int(num or 0) for num in waiting) > 250

    await until(has_more)
    assert set(codes) == {202, 429}, codes
    assert "bounds shared out otherwise" in caplog.text
    known = await ask(0, Homes.map)
    assert sum(known.share(number) for number in known.numbers) <= 1.0


async def test_lists_of_batches_hold_after_moves(callers: Callers, ask: Ask) -> None:
    """A list of a tenant that has lived in all partitions is that of all."""
    tenant = TENANTS[1]
    for number in range(NUM_PARTITIONS):
        await callers.call(tenant, "GET", "/v1/batches")
        await move_tenant(ask, tenant, number)
        page = await callers.call(tenant, "GET", "/v1/batches", 1)
        assert page.status_code == 200, page.text
        assert page.json()["data"] == []


@pytest.mark.parametrize("weights", [pytest.param((1.0, 1.0), marks=pytest.mark.long), (3.0, 1.0)])
@pytest.mark.campaign
async def test_tenants_share_by_weight_across_partitions(
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    shards: OpenShards,
    callers: Callers,
    known: PartitionMap,
    weights: tuple[float, float],
) -> None:
    """One asks for ten times as much as the other, and they live in different partitions: while
    both wait, they get tokens by their weights."""
    api_keys = ApiKeys(redis_client, Keys("test"), None)
    names = [f"share{number}" for number in range(20)]
    first = names[0]
    other = next(name for name in names if known.choose(name) != known.choose(first))
    for tenant, weight in zip((first, other), weights, strict=True):
        terms = KeyTerms(tenant=tenant, weight=weight)
        callers.keys[tenant], _ = await api_keys.create(terms)
    async with serving(redis_server, callers):
        pass  # the model is known, and nobody serves it
    job = {"endpoint": "/v1/completions", "body": {**BODY, "max_tokens": 8}}
    ids: dict[str, list[str]] = {first: [], other: []}
    for number in range(660):
        tenant = other if number % 11 == 0 else first
        answer = await callers.call(tenant, "POST", "/v1/jobs", number % 2, json=job)
        assert answer.status_code == 202, answer.text
        ids[tenant].append(answer.json()["id"])
    model = HashModelOptions(eos_rate=0.0, step_s=0.002)
    worker = WorkerProcess(redis_server.url, model, engine={"max_num_seqs": 4})
    try:
        for job_id in ids[other]:
            await callers.until_ended(other, job_id)
    finally:
        await worker.close()
    claims = dict[str, list[int]]()
    for tenant, own in ids.items():
        shard = shards.at(known.choose(tenant))
        names = [shard.keys.of("job", job_id) for job_id in own]
        times = [await shard.client.hget(name, "claimed") for name in names]
        claims[tenant] = [int(time) for time in times if time is not None]
    from_ms = max(min(own) for own in claims.values())  # the worker has found both partitions
    to_ms = max(claims[other])  # until then both waited
    served = {
        tenant: sum(from_ms <= time <= to_ms for time in own) for tenant, own in claims.items()
    }
    share = served[first] / sum(served.values())
    assert share == pytest.approx(weights[0] / sum(weights), abs=0.02), served


async def partitions(redis_server: EmbeddedRedis, *words: str) -> int:
    """`batchway partitions`, in a thread; returns the exit status."""
    shared = ["--redis-url", redis_server.url, "--namespace", "test"]
    return await asyncio.to_thread(main, ["partitions", *words, *shared])


@pytest.mark.campaign
async def test_partitions_are_added_and_drained_under_load(
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    callers: Callers,
    ask: Ask,
) -> None:
    """While jobs come, one worker is killed and another takes its place: each job ends once."""
    ids, is_over = list[tuple[str, str]](), asyncio.Event()

    async def submit(gateway: int) -> None:
        number = gateway
        while not is_over.is_set():
            tenant = TENANTS[number % len(TENANTS)]
            ids.append((tenant, await callers.submit(tenant, gateway)))
            number += 1

    async with serving(redis_server, callers) as killed:
        submitting = [asyncio.create_task(submit(gateway)) for gateway in (0, 1)]
        async with serving(redis_server, callers):
            assert await partitions(redis_server, "add") == 0
            killed.kill()
            for tenant in TENANTS[:4]:
                assert await partitions(redis_server, "move", tenant, "4") == 0
            drained = asyncio.create_task(partitions(redis_server, "drain", "1"))
            await until(lambda: _has_left(ask, 1))
            is_over.set()
            await asyncio.gather(*submitting)
            assert await drained == EXIT_LEFT  # its jobs are kept
            assert await partitions(redis_server, "drain", "0") == 2  # the map is there
            for tenant, job_id in ids:
                assert (await callers.until_ended(tenant, job_id, 1))["status"] == "succeeded"
            assert await partitions(redis_server, "list", "--json", "-") == 0
            assert 4 in {partition_of(job_id) for _, job_id in ids}
            assert len(set(ids)) == len(ids)
            for tenant, job_id in ids:
                if partition_of(job_id) == 1:
                    path = f"/v1/jobs/{job_id}"
                    assert (await callers.call(tenant, "DELETE", path)).status_code == 200
            assert await partitions(redis_server, "drain", "1") == 0
            known = await ask(0, Homes.map)
            assert known.numbers == [0, 2, 3, 4]
            answer = await callers.call(TENANTS[5], "POST", "/v1/completions", json=BODY)
            assert answer.status_code == 200, answer.text


async def _has_left(ask: Ask, number: int) -> bool:
    return all(home.number != number for home in (await ask(0, Homes.tenants)).values())
