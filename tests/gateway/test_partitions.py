"""Several partitions: a tenant's jobs run in its own, at that partition's workers, and every list
and count has all."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.api_keys import ApiKeys, KeyTerms, Scope
from contract.keys import Keys, partition_of
from contract.partitions import partition_of_tenant
from infra.cli import main
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions
from tests.fleet import WorkerProcess, until
from tests.gateway.conftest import Gateways, gateway_client

pytestmark = pytest.mark.anyio

NUM_PARTITIONS = 4
TENANTS = [f"tenant{number}" for number in range(12)]
BODY = {"model": "m", "prompt": "hello", "max_tokens": 4}
JOB = {"endpoint": "/v1/completions", "body": BODY}


def home(tenant: str) -> int:
    return partition_of_tenant(tenant, NUM_PARTITIONS)


def tenant_of(partition: int) -> str:
    return next(tenant for tenant in TENANTS if home(tenant) == partition)


class Callers:
    """Clients of two gateways, with a key for each tenant."""

    def __init__(self, gateways: Sequence[httpx.AsyncClient], api_keys: ApiKeys) -> None:
        self.gateways = gateways
        self.keys: dict[str, str] = {}
        self._api_keys = api_keys

    async def add(self, tenant: str, **terms: Any) -> None:
        self.keys[tenant], _ = await self._api_keys.create(KeyTerms(tenant=tenant, **terms))

    async def call(
        self, tenant: str, method: str, path: str, gateway: int = 0, **terms: Any
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys[tenant]}", **terms.pop("headers", {})}
        return await self.gateways[gateway].request(method, path, headers=headers, **terms)

    async def read(
        self, tenant: str, path: str, gateway: int = 0, method: str = "GET", **terms: Any
    ) -> dict[str, Any]:
        """The answer of a call that succeeds."""
        answer = await self.call(tenant, method, path, gateway, **terms)
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def post(self, tenant: str, path: str, **terms: Any) -> dict[str, Any]:
        return await self.read(tenant, path, method="POST", **terms)

    async def submit(self, tenant: str) -> str:
        return str((await self.post(tenant, "/v1/jobs", json=JOB))["id"])

    async def until_ended(self, tenant: str, path: str, gateway: int = 0) -> dict[str, Any]:
        """Of a job, a batch or an operation."""
        found: dict[str, Any] = {}

        async def has_ended() -> bool:
            found.update(await self.read(tenant, path, gateway))
            return found["status"] in ("succeeded", "completed", "cancelled", "failed", "expired")

        await until(has_ended)
        return found

    async def page_ids(self, path: str, **query: str) -> list[str]:
        """The ids of all pages, read by an admin from the gateways in turn."""
        found, after, gateway = list[str](), "", 0
        while True:
            terms = {**query, **({"after": after} if after else {})}
            page = await self.read("boss", path, gateway, params=terms)
            found += [row["id"] for row in page["data"]]
            if not page["has_more"]:
                return found
            after, gateway = page["last_id"], 1 - gateway


@pytest.fixture
def bounds() -> dict[str, Any]:
    """Settings of the gateways; tests override it."""
    return {}


@pytest.fixture
async def callers(
    gateways: Gateways, redis_client: redis.asyncio.Redis, tmp_path: Path, bounds: dict[str, Any]
) -> AsyncIterator[Callers]:
    """The second gateway takes the number of partitions that the first has stored."""
    settings = {"lane_bound_s": 0.0, "object_store": str(tmp_path / "objects"), **bounds}
    async with gateways(partitions=NUM_PARTITIONS, **settings) as first:
        await first.get("/readyz")
        async with gateways(**settings) as second:
            found = Callers([first, second], ApiKeys(redis_client, Keys("test"), None))
            for tenant in TENANTS:
                await found.add(tenant)
            await found.add("boss", scopes=(Scope.ADMIN,))
            yield found


@contextlib.asynccontextmanager
async def serving(
    redis_server: EmbeddedRedis, callers: Callers, partitions: Sequence[int]
) -> AsyncIterator[None]:
    """A worker in each of these partitions, which both gateways know."""
    workers = [WorkerProcess(redis_server.url, HashModelOptions(), partition=n) for n in partitions]

    async def are_known(gateway: int) -> bool:
        answer = await callers.call("boss", "GET", "/readyz", gateway)
        return bool(answer.json().get("workers") == {"m": len(partitions)})

    try:
        for gateway in (0, 1):
            await until(lambda: are_known(gateway))  # noqa: B023
        yield
    finally:
        for worker in workers:
            await worker.close()


@pytest.mark.campaign
async def test_jobs_run_in_the_partitions_of_their_tenants_and_an_admin_sees_all(
    redis_server: EmbeddedRedis, callers: Callers
) -> None:
    """Either gateway finds each job, and lists them all; metrics and the list of workers are those
    of all partitions; a batch is fed in its tenant's."""
    async with serving(redis_server, callers, range(NUM_PARTITIONS)):
        ids = [await callers.submit(tenant) for tenant in TENANTS]
        assert [partition_of(job_id) for job_id in ids] == [home(tenant) for tenant in TENANTS]
        assert len({partition_of(job_id) for job_id in ids}) == NUM_PARTITIONS
        for tenant, job_id in zip(TENANTS, ids, strict=True):
            ended = await callers.until_ended(tenant, f"/v1/jobs/{job_id}", gateway=1)
            assert ended["status"] == "succeeded"
        answer = await callers.call(TENANTS[0], "POST", "/v1/completions", 1, json=BODY)
        assert answer.status_code == 200, answer.text
        listed = await callers.page_ids("/v1/jobs", tenant="*", limit="5")
        assert listed == [answer.headers["x-job-id"], *ids[::-1]]
        metrics = (await callers.call("boss", "GET", "/metrics")).text.splitlines()
        counted = [line for line in metrics if line.startswith("batchway_requests_total{")]
        assert sum(float(line.split()[-1]) for line in counted) == len(TENANTS) + 1
        assert 'batchway_workers{model_name="m"} 4.0' in metrics
        await a_batch_ends(callers, tenant_of(3))


async def a_batch_ends(callers: Callers, tenant: str) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": BODY}
    content = {"file": ("lines.jsonl", json.dumps(line).encode())}
    file = await callers.post(tenant, "/v1/files", files=content, data={"purpose": "batch"})
    asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
    made = await callers.post(tenant, "/v1/batches", json=asked | {"input_file_id": file["id"]})
    assert partition_of(made["id"]) == partition_of(file["id"]) == home(tenant)
    ended = await callers.until_ended(tenant, f"/v1/batches/{made['id']}", gateway=1)
    assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", 1)
    assert partition_of(ended["output_file_id"]) == home(tenant)


async def test_a_partition_without_a_worker_says_so(
    redis_server: EmbeddedRedis, callers: Callers
) -> None:
    """Calls of its tenants are refused and their jobs wait, while others are served."""
    async with serving(redis_server, callers, [0]):
        for tenant in (tenant_of(0), tenant_of(1)):
            answer = await callers.call(tenant, "POST", "/v1/completions", json=BODY)
            job_id = await callers.submit(tenant)
            path = f"/v1/jobs/{job_id}"
            if home(tenant) == 0:
                assert answer.status_code == 200, answer.text
                assert (await callers.until_ended(tenant, path))["status"] == "succeeded"
                continue
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "no_workers")
            assert "in partition 1 of 4, which is this tenant's" in error["message"]
            job = await callers.read(tenant, path)
            assert (job["status"], job["waiting_for"]) == ("queued", "worker")


async def test_limits_of_a_tenant_are_exact(callers: Callers) -> None:
    """Two gateways together admit as many requests as one would."""
    await callers.add("limited", requests_per_minute=6)
    codes = Counter[int]()
    for turn in range(24):
        answer = await callers.call("limited", "POST", "/v1/completions", turn % 2, json=BODY)
        codes[answer.status_code] += 1
    assert codes[429] == 24 - 6, codes  # 404 within the limit: nobody serves the model


@pytest.mark.parametrize("bounds", [{"max_tenant_file_bytes": 100}])
async def test_the_quota_of_files_is_exact(callers: Callers) -> None:
    codes = list[int]()
    for turn in range(3):
        content = {"file": ("f", b"x" * 40)}
        answer = await callers.call(
            TENANTS[0], "POST", "/v1/files", turn % 2, files=content, data={"purpose": "batch"}
        )
        codes.append(answer.status_code)
    assert codes == [200, 200, 429]


@pytest.mark.parametrize("bounds", [{"lane_bound_tokens": 400}])
async def test_each_partition_has_an_equal_part_of_a_lane_s_bound(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, callers: Callers
) -> None:
    async with serving(redis_server, callers, [0]):
        pass  # the model is known, and nobody serves it
    for tenant in (tenant_of(1), tenant_of(2)):
        refused: httpx.Response | None = None
        for turn in range(40):
            answer = await callers.call(tenant, "POST", "/v1/jobs", turn % 2, json=JOB)
            if answer.status_code != 202:
                refused = answer
                break
        assert refused is not None
        assert refused.json()["error"]["code"] == "lane_full", refused.text
        key = Keys("test", home(tenant)).of("counters", "m", "standard")
        assert 80 < int(await redis_client.hget(key, "queued_tokens") or 0) <= 100


async def test_pauses_and_drains_reach_every_partition(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, callers: Callers
) -> None:
    async with serving(redis_server, callers, [3]):
        for path, code in (("pause", 503), ("resume", 202)):
            await callers.post("boss", f"/v1/lanes/{path}", json={"lane": "standard"})
            for partition in range(NUM_PARTITIONS):
                tenant = tenant_of(partition)
                answer = await callers.call(tenant, "POST", "/v1/jobs", 1, json=JOB)
                assert answer.status_code == code, answer.text
        names: Any = await redis_client.zrange(Keys("test", 3).of("workers", "m"), 0, -1)
        [worker] = [name.decode() for name in names]
        await callers.post("boss", f"/v1/workers/{worker}/drain", json={})
        key = Keys("test", 3).of("worker", worker)

        async def has_left() -> bool:
            return not await redis_client.exists(key)

        await until(has_left)


async def test_an_operation_on_all_tenants_is_one(
    redis_server: EmbeddedRedis, callers: Callers
) -> None:
    """A part works in each partition. A tenant's own is in its partition alone."""
    async with serving(redis_server, callers, [0]):
        pass  # the model is known, and nobody serves it
    for tenant in TENANTS:
        await callers.submit(tenant)
    own = TENANTS[1]
    await callers.submit(own)
    asked = {"status": "queued"}
    begun = await callers.post(own, "/v1/jobs/cancel", json=asked)
    assert partition_of(begun["id"]) == home(own)
    ended = await callers.until_ended(own, f"/v1/operations/{begun['id']}", gateway=1)
    assert (ended["status"], ended["matched"], ended["done"]) == ("completed", 2, 2)
    asked["tenant"] = "*"
    begun = await callers.post("boss", "/v1/jobs/cancel", json=asked)
    ended = await callers.until_ended("boss", f"/v1/operations/{begun['id']}", gateway=1)
    assert (ended["matched"], ended["done"]) == (len(TENANTS) - 1, len(TENANTS) - 1)
    listed = (await callers.read("boss", "/v1/operations"))["data"]
    assert [each["id"] for each in listed] == [ended["id"]]


async def test_a_gateway_with_another_number_is_refused(
    redis_server: EmbeddedRedis, callers: Callers, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends. One that started before Redis answered serves nobody."""
    command = ["gateway", "--redis-url", redis_server.url, "--namespace", "test"]
    assert await asyncio.to_thread(main, [*command, "--partitions", "2"]) == 2
    assert "has 4 partitions, for good, but this process was given 2" in capsys.readouterr().err
    async with gateway_client(redis_server.url, partitions=2) as client:
        headers = {"authorization": f"Bearer {callers.keys['boss']}"}
        answer = await client.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 503, answer.text
