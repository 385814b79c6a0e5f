"""Flows of models with different tokenizers, vocabularies and contexts, in each order."""

import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import msgspec
import pytest

from contract.connection import connect
from contract.functions import Functions
from contract.jobs import Job
from contract.keys import Keys
from contract.library import ensure_library
from contract.model_cards import TokenizerFiles
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import VOCAB_SIZE, hash_tokenizer
from tests.gateway.conftest import error_of, make_settings, running_gateway, until_listed
from tests.gateway.fake_worker import FakeWorker, publish_model, says
from tests.gateway.flows.conftest import Fleet, chat, ended, submitted
from tests.gateway.flows.model_files import (
    CHAT,
    COMPLETIONS,
    cascade,
    ensemble,
    pipeline,
    route,
    rule,
    step,
    user,
    write,
)
from tests.gateway.vector_worker import (
    CARDS,
    EMBEDDER,
    PLAIN,
    VECTOR_LANES,
    vector_files,
    vectors,
)

pytestmark = pytest.mark.anyio

# Ids of `high` are those of `low` and so many more; each context in tokens.
SHIFTS = {"low": 0, "high": 100_000, PLAIN: 0, EMBEDDER: 500}
CONTEXTS = {"low": 128, "high": 512, PLAIN: 64, EMBEDDER: 64}
PAIRS = list(itertools.permutations(("low", "high")))


def _kinds(first: str, last: str) -> dict[str, Any]:
    draft = step("draft", first, COMPLETIONS, prompt="{{ input.messages[-1].content }}")

    def answer(model: str) -> dict[str, Any]:
        return step("answer", model, CHAT, messages=user("{{ draft.choices[0].text }}"))

    def routed(long: str, short: str) -> dict[str, Any]:
        return route(short, rules=[rule(long, min_prompt_tokens=50)])

    return {
        "cascade": cascade(first, last, threshold=0.999),
        "vote": ensemble("vote", first, last),
        "route": routed(first, last),
        "pipeline": pipeline(draft, answer(last)),
        "nested": ensemble("vote", f"cascade-{first}", last, first),
        "chosen": routed(f"vote-{first}", f"cascade-{first}"),
        "staged": pipeline(draft, answer(f"vote-{first}")),
    }


KINDS = tuple(_kinds("low", "high"))


def _shifted(files: TokenizerFiles, by: int) -> TokenizerFiles:
    """The same tokens under other ids."""
    tokenizer = json.loads(files.tokenizer_json)
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {name: token_id + by for name, token_id in vocab.items()}
    for token in tokenizer["added_tokens"]:
        token["id"] += by
    for special in (tokenizer["post_processor"] or {"special_tokens": {}})["special_tokens"]:
        ids = tokenizer["post_processor"]["special_tokens"][special]["ids"]
        ids[:] = [token_id + by for token_id in ids]
    return msgspec.structs.replace(files, tokenizer_json=json.dumps(tokenizer))


def _flows() -> dict[str, Any]:
    """Each kind with the members in each order; its name ends with the first."""
    flows = {
        f"{kind}-{first}": definition
        for first, last in PAIRS
        for kind, definition in _kinds(first, last).items()
    }
    for first, last in itertools.permutations((PLAIN, EMBEDDER)):
        flows[f"mean-{first}"] = ensemble("mean", first, last)
    return flows


@pytest.fixture(scope="module")
async def running(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Fleet, str]]:
    """Workers of the models of this file, and the address of a gateway that serves the flows."""
    path = write(tmp_path_factory.mktemp("flows"), **_flows())
    async with connect(redis_server.url, Keys("test")) as client:
        await client.flushall()
        await ensure_library(client)
        fleet = Fleet(client, Keys("test"))
        for name, by in SHIFTS.items():
            await _publish(fleet, name, by)
        with running_gateway(make_settings(redis_server.url, models=str(path))) as url:
            async with httpx.AsyncClient(base_url=url, timeout=20) as http:
                await until_listed(http, {*_flows()})
            yield fleet, url
        await fleet.stop_serving()


async def _publish(fleet: Fleet, name: str, by: int) -> None:
    pooling = CARDS.get(name)
    await publish_model(
        fleet.client,
        fleet.keys,
        name,
        files=_shifted(vector_files() if pooling else hash_tokenizer(), by),
        context_length=CONTEXTS[name],
        vocab_size=VOCAB_SIZE + by,
        lanes=VECTOR_LANES,
        pooling=pooling,
    )
    functions = Functions(fleet.client, fleet.keys)
    worker = FakeWorker(functions, name, f"w-{name}", lanes=VECTOR_LANES)
    worker.script = vectors if pooling else says("an answer")
    await fleet.add(worker)


@pytest.fixture
async def fleet(running: tuple[Fleet, str]) -> Fleet:
    """With workers that are live and have seen no job."""
    fleet, _ = running
    await fleet.beat()
    for worker in fleet.workers.values():
        worker.seen.clear()
    return fleet


@pytest.fixture
async def flows(running: tuple[Fleet, str]) -> AsyncIterator[httpx.AsyncClient]:
    _, url = running
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield client


def body_of(path: str, model: str, text: str) -> dict[str, object]:
    if path == CHAT:
        return chat(model, text)
    return {"model": model, ("prompt" if path == COMPLETIONS else "input"): text}


def seen(fleet: Fleet, *models: str) -> list[Job]:
    return [job for model in models for job in fleet.workers[model].seen]


def check_own_ids(jobs: Sequence[Job]) -> None:
    """Each model got ids of its own vocabulary."""
    for job in jobs:
        by = SHIFTS[job.model]
        for prompt in job.prompts:
            assert all(by <= token_id < by + VOCAB_SIZE for token_id in prompt), job.model


@pytest.mark.parametrize(("kind", "pair"), list(itertools.product(KINDS, PAIRS)))
async def test_each_member_tokenises_for_itself(
    flows: httpx.AsyncClient, fleet: Fleet, kind: str, pair: tuple[str, str]
) -> None:
    """Chats, completions, responses, jobs and quotes; also where a rule counts tokens."""
    model = f"{kind}-{pair[0]}"
    listed = (await flows.get(f"/v1/models/{model}")).json()
    for path in listed["endpoints"]:
        for text in ("hello", "x" * 60):
            answer = await flows.post(path, json=body_of(path, model, text))
            assert answer.status_code == 200, (path, answer.text)
            assert "an answer" in answer.text
    job: dict[str, object] = {"endpoint": CHAT, "body": chat(model)}
    assert (await flows.post("/v1/quote", json=job)).json()["is_admitted"]
    found = await ended(flows, await submitted(flows, job))
    assert found["status"] == "succeeded", found["error"]
    asked = seen(fleet, "low", "high")
    assert asked
    check_own_ids(asked)


@pytest.mark.parametrize("first", [PLAIN, EMBEDDER])
async def test_each_embedder_tokenises_for_itself(
    flows: httpx.AsyncClient, fleet: Fleet, first: str
) -> None:
    body = {"model": f"mean-{first}", "input": ["one", "two"]}
    answer = await flows.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    asked = seen(fleet, PLAIN, EMBEDDER)
    assert {job.model for job in asked} == {PLAIN, EMBEDDER}
    check_own_ids(asked)


@pytest.mark.parametrize("kind", ["cascade", "vote", "nested"])
@pytest.mark.parametrize("pair", PAIRS)
async def test_a_prompt_too_long_for_one_member_is_answered_by_the_other(
    flows: httpx.AsyncClient, fleet: Fleet, kind: str, pair: tuple[str, str]
) -> None:
    """In each order; one too long for both is refused in OpenAI's words, with the longest context.
    A cascade that asks its last member has no other answer."""
    model = f"{kind}-{pair[0]}"
    answer = await flows.post(CHAT, json=chat(model, "x" * 300))
    if (kind, pair[1]) == ("cascade", "low"):
        assert answer.json()["error"]["message"].startswith("low: This model's maximum context")
    else:
        assert answer.status_code == 200, answer.text
    assert {job.model for job in seen(fleet, "low", "high")} == {"high"}
    answer = await flows.post(CHAT, json=chat(model, "x" * 600))
    assert error_of(answer) == (400, "messages", "context_length_exceeded")
    assert "maximum context length is 512 tokens" in answer.text


@pytest.mark.parametrize("pair", PAIRS)
async def test_a_pipeline_takes_what_its_own_steps_can_read(
    flows: httpx.AsyncClient, fleet: Fleet, pair: tuple[str, str]
) -> None:
    """Its caller's text goes to the first step, whatever the last one could read."""
    answer = await flows.post(CHAT, json=chat(f"pipeline-{pair[0]}", "x" * 300))
    assert answer.status_code == (200 if pair[0] == "high" else 400)


@pytest.mark.parametrize("kind", ["cascade", "vote", "nested"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    "fields",
    [{"logit_bias": {"5": 1}}, {"stop_token_ids": [5]}, {"prompt": [5]}, {"prompt": [[5], [6]]}],
)
async def test_token_ids_of_the_caller_are_refused_by_name(
    flows: httpx.AsyncClient,
    fleet: Fleet,
    kind: str,
    pair: tuple[str, str],
    fields: dict[str, object],
) -> None:
    """They would mean something else to each member."""
    body = {"model": f"{kind}-{pair[0]}", "prompt": "a", **fields}
    answer = await flows.post(COMPLETIONS, json=body)
    assert error_of(answer)[:2] == (400, next(iter(fields)))
    assert "have different tokenizers" in answer.json()["error"]["message"]
