"""Flows with models that compute vectors: means, classifiers, scorers, rerank before generation."""

import httpx
import pytest

from tests.gateway.fake_worker import says
from tests.gateway.flows.conftest import Fleet, answer_of, chat
from tests.gateway.flows.model_files import (
    CHAT,
    cascade,
    ensemble,
    pipeline,
    route,
    rule,
    step,
    user,
)
from tests.gateway.vector_worker import (
    CLASSIFIER,
    CONTEXT_LENGTH,
    EMBEDDER,
    LABELS,
    NUM_OUTPUTS,
    PLAIN,
    RERANKER,
    vector_of,
)

pytestmark = pytest.mark.anyio

FLOWS = {
    "mean": ensemble("mean", PLAIN, EMBEDDER),
    "sorted": route(
        "small",
        classifier=CLASSIFIER,
        rules=[rule("large", pattern="^large:"), rule("large", labels=["good"])],
    ),
    "best": ensemble("best-by-score", "small", "large", scorer=RERANKER),
    "best-of-three": ensemble("best-by-score", "small", "large", "small", scorer=RERANKER),
    "judged": cascade("small", "large", confidence={"by": "scorer", "scorer": RERANKER}),
    "retrieval": pipeline(
        step(
            "rank",
            RERANKER,
            "/v1/rerank",
            query="{{ input.messages[-1].content }}",
            documents="{{ input.documents }}",
            top_n=1,
            return_documents=True,
        ),
        step("answer", "large", CHAT, messages=user("{{ rank.results[0].document.text }}")),
    ),
}


@pytest.fixture
async def fleet(fleet: Fleet) -> Fleet:
    await fleet.start_vectors(PLAIN, EMBEDDER, CLASSIFIER, RERANKER)
    return fleet


async def test_the_mean_of_embeddings(flows: httpx.AsyncClient, fleet: Fleet) -> None:
    """Of each input; the usage is that of all members."""
    answer = await flows.post("/v1/embeddings", json={"model": "mean", "input": ["one", "two"]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-batchway-models"] == f"{PLAIN}, {EMBEDDER}"
    seen = [fleet.workers[model].seen[0].prompts for model in (PLAIN, EMBEDDER)]
    for index in (0, 1):
        vectors = [vector_of(prompts[index], NUM_OUTPUTS) for prompts in seen]
        expected = [sum(numbers) / 2 for numbers in zip(*vectors, strict=True)]
        assert answer.json()["data"][index]["embedding"] == pytest.approx(expected, abs=1e-6)
    num_tokens = sum(len(prompt) for prompts in seen for prompt in prompts)
    assert answer.json()["usage"]["prompt_tokens"] == num_tokens
    as_job = {"endpoint": "/v1/embeddings", "body": {"model": "mean", "input": ["one", "two"]}}
    assert (await flows.post("/v1/jobs", json=as_job)).status_code == 202


async def test_a_classifier_chooses_where_no_rule_before_it_holds(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    sure = await flows.post(CHAT, json=chat("sorted", "large: please"))
    assert sure.headers["x-batchway-models"] == "large"
    assert fleet.workers[CLASSIFIER].seen == []
    found = set()
    for text in "abcdef":
        answer = await flows.post(CHAT, json=chat("sorted", text))
        [prompt] = fleet.workers[CLASSIFIER].seen[-1].prompts
        probs = vector_of(prompt, len(LABELS))
        wanted = "large" if LABELS[probs.index(max(probs))] == "good" else "small"
        assert answer.headers["x-batchway-models"] == f"{CLASSIFIER}, {wanted}"
        assert answer_of(answer) == f"I am {wanted}"
        found.add(wanted)
    assert found == {"small", "large"}


async def test_a_text_too_long_for_the_classifier_has_no_label(flows: httpx.AsyncClient) -> None:
    answer = await flows.post(CHAT, json=chat("sorted", "a" * (2 * CONTEXT_LENGTH)))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-batchway-models"] == f"{CLASSIFIER}, small"


async def test_the_scorer_s_favourite_answers(flows: httpx.AsyncClient, fleet: Fleet) -> None:
    for text in ("a", "b", "c"):
        answer = await flows.post(CHAT, json=chat("best", text))
        scored = fleet.workers[RERANKER].seen[-2:]
        by_answer = {
            model: vector_of(job.prompts[0], 1)[0]
            for job in scored
            for model in ("small", "large")
            if f"I am {model}".encode() in bytes(i for i in job.prompts[0] if i < 256)
        }
        best = max(by_answer, key=lambda model: by_answer[model])
        assert answer_of(answer) == f"I am {best}"


async def test_a_flow_makes_no_more_calls_to_a_scorer_than_the_stated_limit(
    flows: httpx.AsyncClient,
) -> None:
    """One for each choice of each member: 3 x 128 are over 256."""
    many = {"model": "best-of-three", "prompt": ["a"] * 16, "n": 8}
    refused = await flows.post("/v1/completions", json=many)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


async def test_a_scorer_may_be_a_cascade_s_judge(flows: httpx.AsyncClient, fleet: Fleet) -> None:
    found = set()
    for text in "abcdef":
        answer = await flows.post(CHAT, json=chat("judged", text))
        score = vector_of(fleet.workers[RERANKER].seen[-1].prompts[0], 1)[0]
        wanted = "small" if score >= 0.5 else "large"
        assert answer_of(answer) == f"I am {wanted}"
        found.add(wanted)
    assert found == {"small", "large"}


async def test_the_caller_s_documents_are_ranked_before_generation(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    fleet.say("large", says("so it is"))
    documents = ["red", "green", "blue"]
    body = {**chat("retrieval", "what?"), "documents": documents}
    answer = await flows.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    prompts = fleet.workers[RERANKER].seen[-1].prompts
    scores = [vector_of(prompt, 1)[0] for prompt in prompts]
    best = documents[scores.index(max(scores))]
    [asked] = fleet.workers["large"].seen
    assert bytes(asked.prompt_ids).decode() == f"user: {best}\nassistant: "
    missing = await flows.post(CHAT, json=chat("retrieval", "what?"))
    assert missing.status_code == 400
    assert "rank" in missing.json()["error"]["message"]
