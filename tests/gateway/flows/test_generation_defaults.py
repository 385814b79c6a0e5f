"""The sampling settings of a flow's members, which differ."""

from typing import Any

import httpx
import pytest

from contract.model_cards import GenerationDefaults
from tests.fleet import until
from tests.gateway.fake_worker import publish_model
from tests.gateway.flows.conftest import Fleet, chat

pytestmark = pytest.mark.anyio

TEMPERATURES = {"small": 0.2, "large": 0.7, "third": 0.9}


@pytest.mark.parametrize(
    ("model", "members"),
    [
        ("router", ("small",)),
        ("cascade", ("small", "large")),
        ("vote", ("small", "large", "third")),
        ("pipe", ("small", "large")),
    ],
)
async def test_each_member_has_its_own_settings_unless_the_caller_gives_one(
    flows: httpx.AsyncClient, fleet: Fleet, model: str, members: tuple[str, ...]
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

    bodies: list[dict[str, Any]] = [{}, {"temperature": 0.4, "logit_bias": {"5": 1}}]
    for asked in bodies:
        for worker in fleet.workers.values():
            worker.seen.clear()
        answer = await flows.post("/v1/chat/completions", json=chat(model, max_tokens=50, **asked))
        assert answer.status_code == 200, answer.text
        for name in members:
            params = fleet.workers[name].seen[0].params
            found = (params.temperature, params.logit_bias)
            is_given = bool(asked) and model != "pipe"
            assert found == ((0.4, {5: 1.0}) if is_given else (TEMPERATURES[name], {5: -100.0}))
