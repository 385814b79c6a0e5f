"""models.yaml while gateways run: what is read again, refused, withdrawn."""

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.keys import Keys
from contract.starts import ANY_LANE, Starts
from tests.fleet import until
from tests.gateway.conftest import Gateways, until_listed
from tests.gateway.fake_worker import publish_model
from tests.gateway.flows.conftest import (
    FLOWS,
    Fleet,
    answer_of,
    chat,
    ended,
    job,
    submitted,
)
from tests.gateway.flows.model_files import CHAT, ensemble
from tests.gateway.vector_worker import vector_files

pytestmark = pytest.mark.anyio


def replace_file(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def rewrite(path: Path, **flows: Any) -> None:
    models = [{"name": name} | flow for name, flow in flows.items()]
    replace_file(path, json.dumps({"models": models}))


def without(*names: str) -> dict[str, Any]:
    return {name: flow for name, flow in FLOWS.items() if name not in names}


async def test_a_changed_file_is_read_again(
    flows: httpx.AsyncClient, fleet: Fleet, models_yaml: Path
) -> None:
    """What runs goes on as it was accepted; a flow that is gone is an unknown model."""
    await fleet.stop_serving("large")
    job_id = await submitted(flows, job("cascade"))
    claimed = await fleet.workers["large"].claim()
    rewrite(models_yaml, **without("cascade", "nested"), second=ensemble("vote", "third", "third"))
    await until_listed(flows, {"second", "vote"}, {"cascade", "nested"})
    assert answer_of(await flows.post(CHAT, json=chat("second"))) == "I am third"
    gone = await flows.post(CHAT, json=chat("cascade"))
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    await fleet.workers["large"].run(claimed)
    assert (await ended(flows, job_id))["status"] == "succeeded"


# Nine nested aliases would be gigabytes.
_ALIASES = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
_HOSTILE = "\n".join([f"a0: &a0 [{', '.join('x' * 10)}]", *_ALIASES, "models: *a8"])
# Flows that are refused, and what the log says of them.
WRONG = {
    "'nobody'": ensemble("vote", "small", "nobody"),
    "bad -> bad": ensemble("vote", "small", "bad"),
    "mean": ensemble("mean", "small", "large"),
    "threshold": {"cascade": {"members": [{"model": "small"}, {"model": "large"}]}},
}


async def test_a_wrong_file_changes_nothing(
    flows: httpx.AsyncClient, fleet: Fleet, models_yaml: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says why; the flows stay as they were, also where Redis loses them."""

    async def until_told(word: str) -> None:
        async def is_told() -> bool:
            return word in caplog.text

        await until(is_told, 20)
        assert len(caplog.records) == 1
        assert "stays as it was" in caplog.text
        caplog.clear()

    with caplog.at_level(logging.WARNING, "batchway.flows"):
        for word, flow in WRONG.items():
            rewrite(models_yaml, bad=flow)
            await until_told(word)
        replace_file(models_yaml, _HOSTILE)
        await until_told("line 1: anchors and aliases")
    await until_published_again(fleet, "vote")
    await fleet.beat()
    await until_listed(flows, {"vote"}, {"bad"})
    answer_of(await flows.post(CHAT, json=chat("vote")))


async def until_published_again(fleet: Fleet, flow: str) -> None:
    """As if Redis had lost it."""
    card = fleet.keys.of("model", flow)
    await fleet.client.delete(card)

    async def is_back() -> bool:
        return bool(await fleet.client.exists(card))

    await until(is_back, 20)


async def test_tokens_are_refused_where_the_members_read_them_otherwise(
    flows: httpx.AsyncClient, fleet: Fleet, models_yaml: Path
) -> None:
    """Log probabilities of tokens, and prompts of token ids; text is fine."""
    await publish_model(fleet.client, fleet.keys, "other", files=vector_files())
    rewrite(models_yaml, mixed=ensemble("vote", "small", "other"))
    await until_listed(flows, {"mixed"}, {"vote"})
    body = {"model": "mixed", "prompt": "a"}
    for more, param in (({"logprobs": 1}, "logprobs"), ({"prompt": [1, 2]}, "prompt")):
        refused = await flows.post("/v1/completions", json={**body, **more})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    answer = await flows.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["text"] == "I am small", "the other has no worker"


async def test_flows_are_published_again_where_redis_lost_them(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    await until_published_again(fleet, "vote")


async def test_a_flow_that_is_gone_leaves_its_name_to_a_model(
    flows: httpx.AsyncClient, fleet: Fleet, models_yaml: Path
) -> None:
    """Its jobs are run to their ends before its worker leaves."""
    rewrite(models_yaml, **without("vote"))
    await until_listed(flows, {"pipe"}, {"vote"})
    await fleet.start("vote")
    await until_listed(flows, {"vote"})
    assert answer_of(await flows.post(CHAT, json=chat("vote"))) == "I am vote"
    await fleet.stop_serving("vote")

    async def has_left() -> bool:
        found = await fleet.client.zrange(fleet.keys.of("workers", "vote"), 0, -1)
        return found == [b"w-vote"]

    await until(has_left, 20)


async def test_a_restarted_gateway_withdraws_flows_that_its_file_no_longer_has(
    gateways: Gateways, fleet: Fleet, models_yaml: Path
) -> None:
    """But not those that another gateway runs."""
    async with gateways(models=str(models_yaml)) as client:
        await until_listed(client, {"vote", "pipe"})
        other = models_yaml.with_name("other.yaml")
        rewrite(other, second=FLOWS["vote"])
        async with gateways(models=str(other)) as second:
            await until_listed(second, {"second", "vote", "pipe"})
    rewrite(models_yaml, **without("vote"))
    async with gateways(models=str(models_yaml)) as client:
        await until_listed(client, {"pipe"}, {"vote", "second"})


async def test_declared_members_are_started_for_their_flows(
    runners: Gateways, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Their flows are served once they are published; until then no call could ask for them. A
    declared model that no flow calls is not started."""
    starts = Starts(redis_client, keys)
    async with runners(declared_models=("large", "other")):
        await until(lambda: starts.is_wanted("large", ANY_LANE))
        assert not await starts.is_wanted("other", ANY_LANE)
