"""POST /v1/rerank, /v1/score, /v1/classify: shapes, pairs, and cosines of embeddings."""

import math
from typing import Any

import httpx
import pytest

from contract.jobs import Job
from tests.fakes import BOS_ID, EOS_ID, encode_text
from tests.gateway.conftest import Serving, answered
from tests.gateway.test_embeddings import expected, ids_of
from tests.gateway.vector_worker import (
    CLASSIFIER,
    EMBEDDER,
    GRADER,
    LABELS,
    OF_PAIRS,
    RERANKER,
    TEMPLATED,
    vector_of,
)

pytestmark = pytest.mark.anyio

DOCUMENTS = ["one", "two", "three", "four"]


def id_of(prefix: str, job: Job) -> str:
    return f"{prefix}-" + job.id.removeprefix("job-")


def pair_ids(first: str, second: str) -> tuple[int, ...]:
    return (*ids_of(first), *encode_text(second), EOS_ID)


def cosine(first: list[float], second: list[float]) -> float:
    dot = sum(a * b for a, b in zip(first, second, strict=True))
    return dot / math.hypot(*first) / math.hypot(*second)


async def test_documents_are_ranked_by_their_score(
    serving: Serving, http: httpx.AsyncClient
) -> None:
    """Best first, in Cohere's shape. Pairs have the tokenizer's special tokens, and the job says
    how many tokens belong to the query, after the model's instruction."""
    worker = await serving(RERANKER)
    body = {"model": RERANKER, "query": "q", "documents": DOCUMENTS}
    answer = await answered(http, "/v1/rerank", body)
    pairs = [pair_ids("I: q", document) for document in DOCUMENTS]
    scores = [vector_of(ids, 1)[0] for ids in pairs]
    [job] = worker.seen
    assert answer == {
        "id": id_of("rerank", job),
        "model": RERANKER,
        "usage": {"prompt_tokens": sum(map(len, pairs)), "total_tokens": sum(map(len, pairs))},
        "results": [
            {"index": index, "relevance_score": scores[index]}
            for index in sorted(range(4), key=lambda index: -scores[index])
        ],
    }
    assert list(job.prompts) == pairs
    assert job.pooling is not None
    assert job.pooling.first_parts == (len(ids_of("I: q")),) * 4
    assert pairs[0][0] == BOS_ID


async def test_the_best_documents_are_returned(serving: Serving, http: httpx.AsyncClient) -> None:
    """`top_n` of them, or all where there are fewer; their texts if asked for."""
    await serving(RERANKER)
    documents = ["one", {"text": "two"}, "three", {"text": "four"}]
    body = {"model": RERANKER, "query": "q", "documents": documents}
    whole = (await answered(http, "/v1/rerank", body))["results"]
    for top_n, number in ((1, 1), (3, 3), (9, 4), (0, 4)):
        found = (await answered(http, "/v1/rerank", body | {"top_n": top_n}))["results"]
        assert found == whole[:number]
    found = (await answered(http, "/v1/rerank", body | {"return_documents": True}))["results"]
    assert [each["document"] for each in found] == [
        {"text": DOCUMENTS[each["index"]]} for each in whole
    ]


async def test_a_template_renders_pairs(serving: Serving, http: httpx.AsyncClient) -> None:
    """In the roles of rerankers, after the instruction, without special tokens around it."""
    worker = await serving(TEMPLATED)
    body = {"model": TEMPLATED, "query": "q", "documents": ["one", "two"]}
    answer = await answered(http, "/v1/rerank", body)
    texts = [f"<system>judge<query>q<document>{document}" for document in ("one", "two")]
    [job] = worker.seen
    assert [bytes(ids).decode() for ids in job.prompts] == texts
    assert job.pooling is not None
    assert job.pooling.first_parts == ()
    scores = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert scores == {i: vector_of(encode_text(text), 1)[0] for i, text in enumerate(texts)}


async def test_embeddings_rank_by_their_cosine(serving: Serving, http: httpx.AsyncClient) -> None:
    """Each text after its own instruction; the query is computed once."""
    worker = await serving(EMBEDDER)
    body = {"model": EMBEDDER, "query": "q", "documents": DOCUMENTS}
    answer = await answered(http, "/v1/rerank", body)
    query = expected("Q: q")
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert found == pytest.approx(
        {i: cosine(query, expected(f"D: {text}")) for i, text in enumerate(DOCUMENTS)}
    )
    assert [*found.values()] == sorted(found.values(), reverse=True)
    assert [job.num_prompts for job in worker.seen] == [5]


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "b", [("a", "b")]),
        ("a", ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a"], ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
    ],
)
async def test_texts_are_scored_in_pairs(
    serving: Serving, http: httpx.AsyncClient, first: Any, second: Any, pairs: list[tuple[str, str]]
) -> None:
    """One with one, one with each of several, or each with its own; by either kind of model."""
    worker = await serving(RERANKER)
    await serving(EMBEDDER)
    answer = await answered(
        http, "/v1/score", {"model": RERANKER, "text_1": first, "text_2": second}
    )
    scores = [vector_of(pair_ids(f"I: {a}", b), 1)[0] for a, b in pairs]
    assert answer == {
        "id": id_of("score", worker.seen[0]),
        "object": "list",
        "created": answer["created"],
        "model": RERANKER,
        "data": [{"index": i, "object": "score", "score": s} for i, s in enumerate(scores)],
        "usage": answer["usage"],
    }
    answer = await answered(
        http, "/v1/score", {"model": EMBEDDER, "text_1": first, "text_2": second}
    )
    cosines = [cosine(expected(f"Q: {a}"), expected(f"D: {b}")) for a, b in pairs]
    assert [each["score"] for each in answer["data"]] == pytest.approx(cosines)


@pytest.mark.parametrize("given", ["ab", ["ab", "c"], [[97], [98, 99]]])
async def test_texts_are_classified(serving: Serving, http: httpx.AsyncClient, given: Any) -> None:
    """With the label of the highest number, in vLLM's shape."""
    worker = await serving(CLASSIFIER)
    answer = await answered(http, "/v1/classify", {"model": CLASSIFIER, "input": given})
    [job] = worker.seen
    probs = [vector_of(ids, len(LABELS)) for ids in job.prompts]
    assert answer == {
        "id": id_of("classify", job),
        "object": "list",
        "created": job.created_s,
        "model": CLASSIFIER,
        "data": [
            {"index": i, "label": LABELS[p.index(max(p))], "probs": p, "num_classes": 3}
            for i, p in enumerate(probs)
        ],
        "usage": dict.fromkeys(("prompt_tokens", "total_tokens"), job.num_prompt_tokens),
    }


@pytest.mark.parametrize("model", [CLASSIFIER, OF_PAIRS])
@pytest.mark.parametrize("pairs", [[["a", "b"]], [["a", "b"], ["c", "d"]]])
async def test_pairs_are_classified(
    serving: Serving, http: httpx.AsyncClient, model: str, pairs: list[list[str]]
) -> None:
    """As pairs of the tokenizer, whose first part the job tells."""
    worker = await serving(model)
    answer = await answered(http, "/v1/classify", {"model": model, "input": pairs})
    [job] = worker.seen
    prompts = [pair_ids(*pair) for pair in pairs]
    assert list(job.prompts) == prompts
    assert job.pooling is not None
    assert job.pooling.first_parts == (len(ids_of("a")),) * len(pairs)
    assert [each["probs"] for each in answer["data"]] == [
        vector_of(ids, len(LABELS)) for ids in prompts
    ]


async def test_a_model_with_one_score_classifies_single_texts(
    serving: Serving, http: httpx.AsyncClient
) -> None:
    """With the name of its score."""
    await serving(GRADER)
    answer = await answered(http, "/v1/classify", {"model": GRADER, "input": "ab"})
    probs = vector_of(ids_of("ab"), 1)
    assert answer["data"] == [{"index": 0, "label": "grade", "probs": probs, "num_classes": 1}]


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank", "/v2/rerank/"])
async def test_other_paths_of_a_rerank_have_the_same_answer(
    serving: Serving, http: httpx.AsyncClient, path: str
) -> None:
    """Those of Cohere's client and of LiteLLM's providers, with what their bodies have beside."""
    await serving(RERANKER)
    body = {"model": RERANKER, "query": "q", "documents": DOCUMENTS, "top_n": 2}
    expected = await answered(http, "/v1/rerank", body)
    answer = await answered(http, path, body | {"priority": 1, "max_tokens_per_doc": 4096})
    assert answer["results"] == expected["results"]
