"""A flood of long prompts over HTTP, on servers of several sizes: nobody else's calls are refused
for the memory that it takes."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest

from contract.api_keys import ApiKeys, KeyTerms
from contract.connection import connect, end_tasks
from contract.functions import Functions
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model, says
from tests.marks import LONG

pytestmark = pytest.mark.anyio

MIB = 2**20
SIZES = [
    *(8 * MIB, pytest.param(14 * MIB, marks=LONG)),
    *(pytest.param(64 * MIB, marks=pytest.mark.campaign), pytest.param(1024 * MIB, marks=LONG)),
]
LANES = ("interactive", "standard", "batch", "scoring")
NUM_JOBS = int(os.environ.get("FLOOD_JOBS", "200"))
# A job's own bounds, and a client that has too many calls under way.
OWN_BOUNDS = {"lane_full", "tenant_quota", "deadline_infeasible"}
PROMPTS = (12_000, 12_000, 3_000, 100)


class Flood:
    """Tenants that post jobs of every kind, and one that calls and waits."""

    def __init__(self, url: str, flooders: list[str], caller: str) -> None:
        self._rng = random.Random(1)
        self._url = url
        self._flooders = flooders
        self._caller = caller
        self.jobs: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    async def run(self, lanes: tuple[str, ...]) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as http:
            for number in range(NUM_JOBS):
                await self._post(http, lanes)
                if number % 20 == 0:
                    await self._call(http)

    async def _post(self, http: httpx.AsyncClient, lanes: tuple[str, ...]) -> None:
        rng = self._rng
        body = {
            "model": MODEL,
            "prompt": [97 + n % 20 for n in range(rng.choice(PROMPTS))],
            "max_tokens": rng.choice([2, 4, 400]),
        }
        job = {"endpoint": "/v1/completions", "body": body, "lane": rng.choice(lanes)}
        job["metadata"] = {f"m{n}": "v" * 400 for n in range(rng.choice([0, 0, 16]))}
        answer = await http.post("/v1/jobs", json=job, headers=_bearer(rng.choice(self._flooders)))
        self.jobs[_outcome(answer)] += 1

    async def _call(self, http: httpx.AsyncClient) -> None:
        for tier in ("default", "priority", "flex"):  # standard, interactive, batch
            body = {"model": MODEL, "prompt": "ab", "max_tokens": 8, "service_tier": tier}
            answer = await http.post("/v1/completions", json=body, headers=_bearer(self._caller))
            self.calls[_outcome(answer)] += 1


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _outcome(answer: httpx.Response) -> str:
    if answer.status_code in (200, 202):
        return "accepted"
    return str(answer.json()["error"]["code"])


@pytest.fixture
async def flood(request: pytest.FixtureRequest) -> AsyncIterator[Flood]:
    with EmbeddedRedis(max_memory_bytes=request.param) as server:
        keys = Keys("test")
        client = connect(server.url, keys)
        await ensure_library(client)
        await publish_model(client, keys, context_length=16_384, lanes=LANES)
        api_keys = ApiKeys(client, keys)
        made = [await api_keys.create(KeyTerms(tenant=name)) for name in ("a", "b", "caller")]
        worker = FakeWorker(Functions(client, keys), lanes=LANES, script=says("a", "b"))
        await worker.beat()
        serving = asyncio.create_task(worker.serve())
        beating = asyncio.create_task(_beat(worker))
        with running_gateway(make_settings(server.url)) as url:
            yield Flood(url, [made[0][0], made[1][0]], made[2][0])
        await end_tasks(serving, beating)
        await client.aclose()


async def _beat(worker: FakeWorker) -> None:
    while True:
        await worker.beat()
        await asyncio.sleep(2.0)


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lanes", [LANES, ("batch",)], ids=["all lanes", "batch"])
@pytest.mark.parametrize("flood", SIZES, ids=lambda size: f"{size // MIB} MiB", indirect=True)
@pytest.mark.each_value
async def test_a_flood_refuses_nobody_else_for_memory(flood: Flood, lanes: tuple[str, ...]) -> None:
    """Jobs are accepted until their own bounds, waiting or ended. Calls of another tenant are
    answered in every lane; where all lanes are flooded, the smallest server refuses some of them by
    their own bounds. `FLOOD_JOBS` makes it longer."""
    await flood.run(lanes)
    assert set(flood.jobs) <= {"accepted", *OWN_BOUNDS}, flood.jobs
    assert flood.jobs["accepted"] > 10
    assert set(flood.calls) <= {"accepted", *OWN_BOUNDS}, flood.calls
    share = 1.0 if lanes == ("batch",) else 0.5
    assert flood.calls["accepted"] >= share * flood.calls.total(), flood.calls
