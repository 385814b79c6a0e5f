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
from infra.embedded_redis import EmbeddedRedis
from tests.fleet import until
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import publish_model
from tests.gateway.flows.conftest import FLOWS, Fleet, chat
from tests.gateway.vector_worker import vector_files

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


def rewrite(path: Path, models: list[Any]) -> None:
    write(path, json.dumps({"models": models}))


def write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def until_listed(flows: httpx.AsyncClient, wanted: set[str], unwanted: set[str]) -> None:
    async def is_so() -> bool:
        listed = {model["id"] for model in (await flows.get("/v1/models")).json()["data"]}
        return wanted <= listed and not unwanted & listed

    await until(is_so, 20)


async def test_a_changed_file_is_read_again(
    flows: httpx.AsyncClient, fleet: Fleet, models_yaml: Path
) -> None:
    """What runs goes on as it was accepted; a flow that is gone is an unknown model."""
    await fleet.stop_serving("large")
    body = {"endpoint": CHAT, "body": chat("cascade")}
    job_id = (await flows.post("/v1/jobs", json=body)).json()["id"]
    claimed = await fleet.workers["large"].claim()
    second = {"name": "second", "ensemble": {"members": ["third", "third"], "combine": "vote"}}
    others = [flow for flow in FLOWS["models"] if flow["name"] not in ("cascade", "nested")]
    rewrite(models_yaml, [*others, second])
    await until_listed(flows, {"second", "vote"}, {"cascade", "nested"})
    answer = await flows.post(CHAT, json=chat("second"))
    assert answer.json()["choices"][0]["message"]["content"] == "I am third"
    gone = await flows.post(CHAT, json=chat("cascade"))
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    await fleet.workers["large"].run(claimed)

    async def has_ended() -> bool:
        job = (await flows.get(f"/v1/jobs/{job_id}")).json()
        return bool(job["status"] == "succeeded")

    await until(has_ended, 20)


@pytest.mark.parametrize(
    ("flow", "word"),
    [
        ({"ensemble": {"members": ["small", "nobody"], "combine": "vote"}}, "'nobody'"),
        ({"ensemble": {"members": ["small", "bad"], "combine": "vote"}}, "bad -> bad"),
        ({"ensemble": {"members": ["small", "large"], "combine": "mean"}}, "mean"),
        ({"cascade": {"members": [{"model": "small"}, {"model": "large"}]}}, "threshold"),
    ],
    ids=["unknown member", "cycle", "impossible type", "no threshold"],
)
async def test_a_wrong_file_changes_nothing(
    flows: httpx.AsyncClient,
    fleet: Fleet,
    models_yaml: Path,
    caplog: pytest.LogCaptureFixture,
    flow: dict[str, Any],
    word: str,
) -> None:
    """One line says why; the flows stay as they were."""
    with caplog.at_level(logging.WARNING, "batchway.flows"):
        rewrite(models_yaml, [{"name": "bad", **flow}])

        async def is_told() -> bool:
            return word in caplog.text

        await until(is_told, 20)
    assert len(caplog.records) == 1
    card = fleet.keys.of("model", "vote")
    await fleet.client.delete(card)

    async def is_published() -> bool:
        return bool(await fleet.client.exists(card))

    await until(is_published, 20)
    await until_listed(flows, {"vote"}, set())
    assert "stays as it was" in caplog.text
    answer = await flows.post(CHAT, json=chat("vote"))
    assert answer.status_code == 200
    listed = {model["id"] for model in (await flows.get("/v1/models")).json()["data"]}
    assert "bad" not in listed


async def test_a_hostile_file_changes_nothing(
    flows: httpx.AsyncClient, models_yaml: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nine nested aliases would be gigabytes: the gateway says the line, and serves on."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with caplog.at_level(logging.WARNING, "batchway.flows"):
        write(models_yaml, "\n".join([*lines, "models: *a8"]))

        async def is_told() -> bool:
            return "line 1: anchors and aliases" in caplog.text

        await until(is_told, 20)
    answer = await flows.post(CHAT, json=chat("vote"))
    assert answer.status_code == 200


async def test_tokens_are_refused_where_the_members_read_them_otherwise(
    flows: httpx.AsyncClient, fleet: Fleet, models_yaml: Path
) -> None:
    """Log probabilities of tokens, and prompts of token ids; text is fine."""
    await publish_model(fleet.client, fleet.keys, "other", files=vector_files())
    mixed = {"name": "mixed", "ensemble": {"members": ["small", "other"], "combine": "vote"}}
    rewrite(models_yaml, [mixed])
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
    await fleet.client.delete(fleet.keys.of("model", "vote"))

    async def is_back() -> bool:
        return bool(await fleet.client.exists(fleet.keys.of("model", "vote")))

    await until(is_back, 20)


async def test_a_flow_that_is_gone_leaves_its_name_to_a_model(
    flows: httpx.AsyncClient, fleet: Fleet, models_yaml: Path
) -> None:
    """Its jobs are run to their ends before its worker leaves."""
    rewrite(models_yaml, [flow for flow in FLOWS["models"] if flow["name"] != "vote"])
    await until_listed(flows, {"pipe"}, {"vote"})
    await fleet.start("vote")
    await until_listed(flows, {"vote"}, set())
    answer = await flows.post(CHAT, json=chat("vote"))
    assert answer.json()["choices"][0]["message"]["content"] == "I am vote"
    await fleet.stop_serving("vote")

    async def has_left() -> bool:
        found = await fleet.client.zrange(fleet.keys.of("workers", "vote"), 0, -1)
        return found == [b"w-vote"]

    await until(has_left, 20)


async def test_a_restarted_gateway_withdraws_flows_that_its_file_no_longer_has(
    redis_server: EmbeddedRedis, fleet: Fleet, models_yaml: Path
) -> None:
    """But not those that another gateway runs."""
    settings = make_settings(redis_server.url, models=str(models_yaml))

    async def serve(url: str, wanted: set[str], unwanted: set[str]) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            await until_listed(client, wanted, unwanted)

    with running_gateway(settings) as url:
        await serve(url, {"vote", "pipe"}, set())
        other = models_yaml.with_name("other.yaml")
        rewrite(other, [{**FLOWS["models"][2], "name": "second"}])
        with running_gateway(make_settings(redis_server.url, models=str(other))) as second_url:
            await serve(second_url, {"second", "vote", "pipe"}, set())
    rewrite(models_yaml, [flow for flow in FLOWS["models"] if flow["name"] != "vote"])
    with running_gateway(settings) as url:
        await serve(url, {"pipe"}, {"vote", "second"})


async def test_declared_members_are_started_for_their_flows(
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    models_yaml: Path,
) -> None:
    """Their flows are served once they are published; until then no call could ask for them. A
    declared model that no flow calls is not started."""
    starts = Starts(redis_client, keys)
    settings = make_settings(
        redis_server.url, models=str(models_yaml), declared_models=("large", "other")
    )
    with running_gateway(settings):
        await until(lambda: starts.is_wanted("large", ANY_LANE))
        assert not await starts.is_wanted("other", ANY_LANE)
