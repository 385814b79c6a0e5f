"""Each kind of flow over HTTP: which models it calls, what it answers, what it says of them."""

import httpx
import pytest

from tests.gateway.fake_worker import says
from tests.gateway.flows.conftest import Fleet, chat

pytestmark = pytest.mark.anyio


async def test_a_route_by_rules_answers_with_the_chosen_model(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    easy = await flows.post("/v1/chat/completions", json=chat("router", "easy"))
    hard = await flows.post("/v1/chat/completions", json=chat("router", "a hard one"))
    long = await flows.post("/v1/chat/completions", json=chat("router", "x" * 120))
    assert [r.json()["choices"][0]["message"]["content"] for r in (easy, hard, long)] == [
        "I am small",
        "I am large",
        "I am large",
    ]
    assert [r.headers["x-batchway-models"] for r in (easy, hard, long)] == [
        "small",
        "large",
        "large",
    ]
    assert easy.json()["model"] == "router"


async def test_a_cascade_goes_on_where_its_first_member_is_not_sure(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    answer = await flows.post("/v1/chat/completions", json=chat("cascade"))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "I am large"
    assert answer.headers["x-batchway-models"] == "small, large"
    job = (await flows.get(f"/v1/jobs/{answer.headers['x-job-id']}")).json()
    assert [(m["model"], m["status"]) for m in job["members"]] == [
        ("small", "succeeded"),
        ("large", "succeeded"),
    ]
    total = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    for member in job["members"]:
        total = {name: total[name] + member["usage"][name] for name in total}
    used = answer.json()["usage"]
    assert used.pop("completion_tokens_details") == {"reasoning_tokens": 0}
    assert job["usage"] == total == used


async def test_a_vote_takes_the_most_frequent_answer(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    fleet.say("large", says("yes"))
    fleet.say("third", says("y", "es"))
    answer = await flows.post("/v1/chat/completions", json=chat("vote"))
    assert answer.json()["choices"][0]["message"]["content"] == "yes"
    assert answer.headers["x-batchway-models"] == "small, large, third"


async def test_a_pipeline_gives_a_step_the_answers_before_it(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    answer = await flows.post("/v1/chat/completions", json=chat("pipe"))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "I am large"
    [asked] = fleet.workers["large"].seen
    assert bytes(asked.prompt_ids).decode() == "user: edit: I am small\nassistant: "


async def test_a_flow_is_listed_with_its_kind_and_endpoints(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    listed = {model["id"]: model for model in (await flows.get("/v1/models")).json()["data"]}
    assert listed["small"]["flow"] is None
    assert [listed[name]["flow"] for name in ("router", "cascade", "vote", "pipe")] == [
        "route",
        "cascade",
        "ensemble",
        "pipeline",
    ]
    assert listed["pipe"]["endpoints"] == ["/v1/chat/completions", "/v1/responses"]


async def test_a_route_within_a_flow_knows_the_call_s_metadata(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    body = chat("checked", metadata={"tier": "gold"})
    gold = await flows.post("/v1/chat/completions", json=body)
    plain = await flows.post("/v1/chat/completions", json=chat("checked"))
    found = [answer.json()["choices"][0]["message"]["content"] for answer in (gold, plain)]
    assert found == ["I am large", "I am small"]


async def test_a_flow_may_be_a_member_of_another(flows: httpx.AsyncClient, fleet: Fleet) -> None:
    answer = await flows.post("/v1/chat/completions", json=chat("nested"))
    assert answer.json()["choices"][0]["message"]["content"] == "I am large"
    assert answer.headers["x-batchway-models"] == "cascade, third"
