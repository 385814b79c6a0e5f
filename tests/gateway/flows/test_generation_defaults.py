"""The sampling settings of a flow's members, which differ."""

import itertools
from typing import Any

import httpx
import pytest

from contract.model_cards import GenerationDefaults
from tests.fleet import until
from tests.gateway.fake_worker import publish_model
from tests.gateway.flows.conftest import Fleet, answer_of, chat
from tests.gateway.flows.model_files import CHAT

pytestmark = pytest.mark.anyio

TEMPERATURES = {"small": 0.2, "large": 0.7, "third": 0.9}
MEMBERS = {
    "router": ("small",),
    "cascade": ("small", "large"),
    "vote": ("small", "large", "third"),
    "pipe": ("small", "large"),
}
ASKED: dict[str, Any] = {"temperature": 0.4, "logit_bias": {"5": 1}}


async def test_each_member_has_its_own_settings_unless_the_caller_gives_one(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    """A pipeline's steps have bodies of their own, without the caller's parameters."""
    for name, temperature in TEMPERATURES.items():
        own = GenerationDefaults(temperature=temperature, suppress_tokens=(5,))
        await publish_model(fleet.client, fleet.keys, name, generation=own)

    async def are_known() -> bool:
        listed = (await flows.get("/v1/models")).json()["data"]
        shown = {each["id"]: each["generation"]["temperature"] for each in listed}
        return TEMPERATURES.items() <= shown.items()

    await until(are_known)
    await fleet.beat()
    for model, asked in itertools.product(MEMBERS, ({}, ASKED)):
        for worker in fleet.workers.values():
            worker.seen.clear()
        answer_of(await flows.post(CHAT, json=chat(model, max_tokens=50, **asked)))
        for name in MEMBERS[model]:
            params = fleet.workers[name].seen[0].params
            found = (params.temperature, params.logit_bias)
            is_given = bool(asked) and model != "pipe"
            assert found == ((0.4, {5: 1.0}) if is_given else (TEMPERATURES[name], {5: -100.0}))
