"""Each kind of flow over HTTP: which models it calls, what it answers, what it says of them."""

import httpx
import openai
import pytest

from tests.gateway.fake_worker import finds, says
from tests.gateway.flows.conftest import MEMBERS, Fleet, answer_of, chat
from tests.gateway.flows.model_files import CHAT
from tests.streams import whole_stream

pytestmark = pytest.mark.anyio

# The flow, its caller's text, its answer and the models that it calls.
CALLS = [
    ("router", "easy", "I am small", "small"),
    ("router", "a hard one", "I am large", "large"),
    ("router", "x" * 120, "I am large", "large"),
    ("cascade", "hello", "I am large", "small, large"),
    ("vote", "hello", "I am large", "small, large, third"),
    ("pipe", "hello", "I am large", "small, large"),
    ("nested", "hello", "I am large", "cascade, third"),
]


async def test_the_official_client_reads_every_kind_whole_and_as_a_stream(
    flows: httpx.AsyncClient, client: openai.AsyncOpenAI, fleet: Fleet
) -> None:
    """As chats and as responses, under the flow's name, with the usage of all calls."""
    fleet.say("large", says("I am", " lar", "ge"))
    fleet.say("third", says("I am large"))
    for model, text, said, models in CALLS:
        await fleet.beat()
        whole = await flows.post(CHAT, json=chat(model, text))
        assert (answer_of(whole), whole.json()["model"]) == (said, model)
        assert whole.headers["x-batchway-models"] == models
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": text}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said
        assert stream.response.headers["x-batchway-models"].split(", ")[-1] in models.split(", ")
        job = (await flows.get(f"/v1/jobs/{stream.response.headers['x-job-id']}")).json()
        assert chunks[-1].usage is not None
        used = sum(call["usage"]["total_tokens"] for call in job["members"])
        assert chunks[-1].usage.total_tokens == used
        await check_responses(client, model, text, said, models)


async def check_responses(
    client: openai.AsyncOpenAI, model: str, text: str, said: str, models: str
) -> None:
    raw = await client.responses.with_raw_response.create(model=model, input=text)
    response = raw.parse()
    assert raw.headers["x-batchway-models"] == models
    found = response.model, response.status, response.output_text
    assert found == (model, "completed", said)
    assert await client.responses.retrieve(response.id) == response
    async with client.responses.stream(model=model, input=text) as stream:
        events = [event async for event in stream]
        streamed = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (streamed.model, streamed.output_text) == (model, said)
    assert streamed.usage == response.usage


async def test_a_job_names_the_calls_of_its_flow(flows: httpx.AsyncClient, fleet: Fleet) -> None:
    """The second member is asked as the first is not sure; the usage is that of both."""
    fleet.say("small", finds(3, says("I am small")))
    fleet.say("large", finds(2, says("I am large")))
    answer = await flows.post(CHAT, json=chat("cascade"))
    job = (await flows.get(f"/v1/jobs/{answer.headers['x-job-id']}")).json()
    statuses = [(call["model"], call["status"]) for call in job["members"]]
    assert statuses == [("small", "succeeded"), ("large", "succeeded")]
    used = answer.json()["usage"]
    assert used.pop("completion_tokens_details") == {"reasoning_tokens": 0}
    assert job["usage"] == used
    for each in (used, *(call["usage"] for call in job["members"])):
        each["cached_tokens"] = each.pop("prompt_tokens_details")["cached_tokens"]
    assert used["cached_tokens"] == 3 + 2
    assert used == {name: sum(call["usage"][name] for call in job["members"]) for name in used}


@pytest.mark.parametrize("model", ["router", "cascade", "vote", "pipe", "nested"])
async def test_what_its_calls_found_in_caches_is_summed(
    flows: httpx.AsyncClient, fleet: Fleet, model: str
) -> None:
    """Whole, streamed, as a message and in the job; the calls have counted it before."""
    for name, worker in fleet.workers.items():
        fleet.say(name, finds(3, worker.script))
    answer = await flows.post(CHAT, json=chat(model))
    wanted = 3 * sum(len(worker.seen) for worker in fleet.workers.values())
    usage = answer.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == wanted > 0
    job = (await flows.get(f"/v1/jobs/{answer.headers['x-job-id']}")).json()
    assert job["usage"].items() <= usage.items()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = await flows.post(CHAT, json=chat(model) | options)
    assert whole_stream(streamed.text)[-1].data["usage"] == usage
    message = chat(model) | {"max_tokens": 64}
    used = (await flows.post("/v1/messages", json=message)).json()["usage"]
    assert used["cache_read_input_tokens"] == wanted
    assert used["input_tokens"] == usage["prompt_tokens"] - wanted
    totals = [await fleet.client.hgetall(fleet.keys.of("totals", name)) for name in MEMBERS]
    counted = [int(each.get(b"prompt_tokens_cached_total:standard", 0)) for each in totals]
    assert sum(counted) == 3 * wanted


async def test_a_vote_takes_the_most_frequent_answer(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    """However it is cut into tokens."""
    fleet.say("large", says("yes"))
    fleet.say("third", says("y", "es"))
    assert answer_of(await flows.post(CHAT, json=chat("vote"))) == "yes"


async def test_a_pipeline_gives_a_step_the_answers_before_it(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    assert answer_of(await flows.post(CHAT, json=chat("pipe"))) == "I am large"
    [asked] = fleet.workers["large"].seen
    assert bytes(asked.prompt_ids).decode() == "user: edit: I am small\nassistant: "


async def test_a_flow_is_listed_with_its_kind_and_endpoints(flows: httpx.AsyncClient) -> None:
    listed = {model["id"]: model for model in (await flows.get("/v1/models")).json()["data"]}
    kinds = {name: listed[name]["flow"] for name in ("small", "router", "cascade", "vote", "pipe")}
    assert [*kinds.values()] == [None, "route", "cascade", "ensemble", "pipeline"]
    assert listed["pipe"]["endpoints"] == ["/v1/chat/completions", "/v1/responses"]


async def test_a_route_within_a_flow_knows_the_call_s_metadata(flows: httpx.AsyncClient) -> None:
    for tier, said in (("gold", "I am large"), ("none", "I am small")):
        body = chat("checked", metadata={"tier": tier})
        assert answer_of(await flows.post(CHAT, json=body)) == said
    assert answer_of(await flows.post(CHAT, json=chat("checked"))) == "I am small"
