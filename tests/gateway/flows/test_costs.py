"""The times and costs of a flow's calls: in its job's object, and as a tree in the console."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import expect

from contract.api_keys import Scope
from infra.embedded_redis import EmbeddedRedis
from tests.browser import chromium, needs_chromium
from tests.fleet import until
from tests.gateway.conftest import Bearer, make_settings, running_gateway, until_listed
from tests.gateway.flows.conftest import Fleet, ended, job, submitted
from tests.streams import events_of

pytestmark = pytest.mark.anyio


async def test_each_call_has_its_own_record_s_times(flows: httpx.AsyncClient) -> None:
    """Also those of flows within the flow; without a price there is no cost."""
    found = await ended(flows, await submitted(flows, job("nested")))
    [cascade, third] = found["members"]
    assert third["members"] is None
    assert cascade["members"][0]["model"] == "small"
    used = [call["usage"]["completion_tokens"] for call in cascade["members"]]
    assert cascade["usage"]["completion_tokens"] == sum(used)
    for call in (cascade, third, *cascade["members"]):
        own = (await flows.get(f"/v1/jobs/{call['job_id']}")).json()
        assert call["timings"] == own["timings"]
        assert call["status"] == own["status"] == "succeeded"
        assert call["cost"] is own["cost"] is None
    assert found["timings"]["queued_at"] <= cascade["timings"]["queued_at"]
    assert found["cost"] is None


async def test_a_running_call_has_the_times_that_it_has_reached(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    await fleet.stop_serving("small")
    job_id = await submitted(flows, job("pipe"))
    claimed = await fleet.workers["small"].claim()
    [call] = (await flows.get(f"/v1/jobs/{job_id}")).json()["members"]
    assert call["status"] == "running"
    assert call["timings"]["started_at"] >= call["timings"]["queued_at"]
    assert call["timings"]["first_token_at"] is call["timings"]["finished_at"] is None
    await fleet.workers["small"].run(claimed)
    await ended(flows, job_id)


@pytest.mark.campaign
@needs_chromium
async def test_a_flow_costs_the_sum_of_its_calls_at_the_console_s_price(
    redis_server: EmbeddedRedis, fleet: Fleet, models_yaml: Path, bearer: Bearer
) -> None:
    """Each call its output tokens at its model's price, for who may see the fleet; the console
    draws the tree with bars and costs."""
    admin, plain = await bearer("own", scopes=(Scope.ADMIN,)), await bearer("own")
    settings = make_settings(
        redis_server.url, models=str(models_yaml), console=True, worker_price=3.6
    )
    with running_gateway(settings) as url:
        async with client(url, admin) as http, client(url, plain) as other, chromium() as browser:
            await until_listed(http, {"pipe"})
            page = await (await browser.new_context(base_url=url)).new_page()
            await page.goto("/console#flows")
            await page.locator("#login-key").fill(admin["authorization"].split()[1], timeout=20_000)
            await page.locator("#login-key").press("Enter")
            await expect(page.locator("#live")).to_contain_text("live", timeout=20_000)
            job_id = await submitted(http, job("pipe"))
            tree = page.locator("#trees > ul.tree", has=page.locator(f"a[title='{job_id}']"))
            await expect(tree.locator(".facts", has_text="cost")).to_have_count(3, timeout=30_000)
            assert await tree.locator("ul .call").count() == 2
            assert await tree.locator("ul .part.prefill").count() == 2
            prices = await settled_prices(http)
            found = (await http.get(f"/v1/jobs/{job_id}")).json()
            costs = [call["cost"] for call in found["members"]]
            assert found["cost"] == pytest.approx(sum(costs))
            for call, cost in zip(found["members"], costs, strict=True):
                used = call["usage"]["completion_tokens"]
                assert cost == pytest.approx(used * prices[call["model"]] / 1e6)
                alone = (await http.get(f"/v1/jobs/{call['job_id']}")).json()
                assert alone["cost"] == pytest.approx(cost)
            unseen = (await other.get(f"/v1/jobs/{job_id}")).json()
            assert unseen["cost"] is None
            assert [call["cost"] for call in unseen["members"]] == [None, None]


def client(url: str, headers: dict[str, str]) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=20, headers=headers)


async def settled_prices(http: httpx.AsyncClient) -> dict[str, float]:
    """Once the calls lie outside the window of all points that come: an idle model keeps its
    price."""
    found: dict[str, float] = {}

    async def is_settled() -> bool:
        async for state in states_of(http):
            found.update(state["prices"])
            busy = [point["tokens_out"] for point in state["newest"].values()]
            return not any(busy)
        return False

    await until(is_settled, 30)
    return found


async def states_of(http: httpx.AsyncClient) -> AsyncIterator[Any]:
    """What the console is told of the fleet."""
    async with http.stream("GET", "/console/feed") as answer:
        async for event in events_of(answer):
            if "worker_price" in json.dumps(event.data):
                yield event.data
