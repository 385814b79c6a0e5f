"""What calls for vectors may not ask, and what models cannot answer: 400, with the field's name."""

from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Serving
from tests.gateway.fake_worker import MODEL
from tests.gateway.vector_worker import (
    CLASSIFIER,
    CONTEXT_LENGTH,
    EMBEDDER,
    GRADER,
    OF_PAIRS,
    PLAIN,
    RERANKER,
    TEMPLATED,
)

pytestmark = pytest.mark.anyio

LONG = "x" * CONTEXT_LENGTH  # too long with its special tokens
EMBEDDINGS, RERANK, SCORE, CLASSIFY = "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify"
GOOD: dict[str, dict[str, Any]] = {
    EMBEDDINGS: {"model": EMBEDDER, "input": "a"},
    RERANK: {"model": RERANKER, "query": "q", "documents": ["a"]},
    SCORE: {"model": RERANKER, "text_1": "a", "text_2": "b"},
    CLASSIFY: {"model": CLASSIFIER, "input": "a"},
}
# Path, changed fields, and the field that the refusal names.
BAD: list[tuple[str, dict[str, Any], str]] = [
    *(
        (path, {"input": given}, param)
        for path in (EMBEDDINGS, CLASSIFY)
        for given, param in (
            (None, "input"),
            ("", "input"),
            ([], "input"),
            (7, "input"),
            ({"text": "a"}, "input"),
            ([""], "input.0"),
            (["a", "b", "", "c"], "input.2"),
            (["a", None], "input.1"),
            (["a", [1]], "input.1"),
            ([[1], "a"], "input.1"),
            ([1, "a"], "input"),
            ([True], "input"),
            ([1.0], "input"),
            ([[1], []], "input.1"),
            ([[1], [True]], "input.1"),
            ([[[1]]], "input.0"),
            ([-1], "input"),
            ([259], "input"),
            ([[1], [1, 300]], "input.1"),
            ([[1], [2**63]], "input.1"),
            (["a"] * 2049, "input"),
            ([[1]] * 2049, "input"),
        )
    ),
    (EMBEDDINGS, {"encoding_format": "int8"}, "encoding_format"),
    (EMBEDDINGS, {"dimensions": 0}, "dimensions"),
    (EMBEDDINGS, {"dimensions": 3}, "dimensions"),
    (EMBEDDINGS, {"dimensions": "4"}, "dimensions"),
    (EMBEDDINGS, {"model": PLAIN, "dimensions": 4}, "dimensions"),
    (EMBEDDINGS, {"input_type": "passage"}, "input_type"),
    (EMBEDDINGS, {"input": [1], "input_type": "query"}, "input_type"),
    (EMBEDDINGS, {"stream": True}, "stream"),
    (EMBEDDINGS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (EMBEDDINGS, {"inputs": ["a"]}, "inputs"),
    (EMBEDDINGS, {"max_tokens": 4}, "max_tokens"),
    (EMBEDDINGS, {"service_tier": "scoring"}, "service_tier"),
    (EMBEDDINGS, {"input": [["a", "b"]]}, "input.0"),
    (CLASSIFY, {"dimensions": 4}, "dimensions"),
    (CLASSIFY, {"input": [["a", "b"], ["c"]]}, "input.1"),
    (CLASSIFY, {"input": [["a", "b"], ["c", ""]]}, "input.1"),
    (CLASSIFY, {"input": [["a", "b"], "c"]}, "input.1"),
    (CLASSIFY, {"input": [["a", 7]]}, "input.0"),
    (CLASSIFY, {"input": [["a", "b"]] * 2049}, "input"),
    (CLASSIFY, {"model": OF_PAIRS, "input": ["a", "b"]}, "input"),
    (RERANK, {"query": ""}, "query"),
    (RERANK, {"query": ["q"]}, "query"),
    (RERANK, {"documents": "a"}, "documents"),
    (RERANK, {"documents": []}, "documents"),
    (RERANK, {"documents": ["a", ""]}, "documents.1"),
    (RERANK, {"documents": ["a", {"text": ""}]}, "documents.1"),
    (RERANK, {"documents": [{"title": "a"}]}, "documents.0"),
    (RERANK, {"documents": ["a", 7]}, "documents.1"),
    (RERANK, {"documents": ["a"] * 2049}, "documents"),
    (RERANK, {"top_n": -1}, "top_n"),
    (RERANK, {"return_documents": 1}, "return_documents"),
    (SCORE, {"text_1": ""}, "text_1"),
    (SCORE, {"text_2": []}, "text_2"),
    (SCORE, {"text_2": ["a", ""]}, "text_2.1"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
    (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, "text_2"),
]


async def refused(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], code: str = ""
) -> dict[str, Any]:
    """The error of a call, and of the same call as a job."""
    body = GOOD[path] | fields
    answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    answer = await http.post("/v1/jobs", json={"endpoint": path, "body": body})
    assert answer.status_code == 400, answer.text
    as_job = answer.json()["error"]
    assert as_job["param"] == f"body.{error['param']}"
    assert as_job["code"] == error["code"]
    assert code in ("", error["code"])
    return error


async def test_ids_of_another_tokenizer_are_refused_by_name(
    serving: Serving, http: httpx.AsyncClient
) -> None:
    """LangChain sends OpenAI's, unless its caller knows."""
    await serving(EMBEDDER)
    error = await refused(http, EMBEDDINGS, {"input": [[1, 2], [9906, 1917]]})
    own = "those of the model's own tokenizer, from 0 to 258"
    assert error["message"] == f"input.1: token ids must be {own}"


async def test_wrong_fields_are_refused_by_name(serving: Serving, http: httpx.AsyncClient) -> None:
    """With the index of the item in a list; then nothing of the call runs."""
    worker = await serving(EMBEDDER)
    for path, fields, param in BAD:
        error = await refused(http, path, fields)
        assert error["param"] == param, (path, fields, error)
    for path, body in GOOD.items():
        for name in body:
            without = {field: value for field, value in body.items() if field != name}
            answer = await http.post(path, json=without)
            assert answer.json()["error"]["param"] == name
            assert answer.json()["error"]["code"] == "missing_required_parameter"
    assert worker.seen == []


async def test_refusals_tell_what_is_possible(serving: Serving, http: httpx.AsyncClient) -> None:
    """The declared dimensions and instructions, the most inputs, the lengths."""
    error = await refused(http, EMBEDDINGS, {"dimensions": 3})
    assert error["message"] == "dimensions must be one of 2, 4, 8"
    error = await refused(http, EMBEDDINGS, {"model": PLAIN, "dimensions": 3})
    assert error["message"] == "dimensions: the model declares none; its embeddings have 8"
    error = await refused(http, EMBEDDINGS, {"input_type": "passage"})
    assert error["message"] == "input_type must be one of clustering, document, query"
    error = await refused(http, EMBEDDINGS, {"input": ["a"] * 2049})
    assert error["message"] == "input: at most 2048 of them, not 2049"
    error = await refused(http, CLASSIFY, {"model": OF_PAIRS})
    assert error["message"] == "input: this model compares two texts: send pairs, [[text, text], …]"
    error = await refused(http, SCORE, {"text_1": ["a", "b"], "text_2": "c"})
    assert error["message"] == "text_2: must be as many texts as text_1 has, 2, not 1"


@pytest.mark.parametrize(
    ("path", "fields", "param", "length"),
    [
        (EMBEDDINGS, {"input": ["a", "b", "c", LONG]}, "input.3", CONTEXT_LENGTH + 5),
        (EMBEDDINGS, {"input": [7] * (CONTEXT_LENGTH + 1)}, "input", CONTEXT_LENGTH + 1),
        (CLASSIFY, {"input": LONG}, "input", CONTEXT_LENGTH + 2),
        (RERANK, {"documents": ["a", LONG]}, "documents.1", CONTEXT_LENGTH + 7),
        (RERANK, {"query": LONG, "documents": ["a", "b"]}, "query", CONTEXT_LENGTH + 5),
        (RERANK, {"model": TEMPLATED, "query": LONG, "documents": ["a", "b"]}, "query", None),
        (SCORE, {"text_1": ["a", LONG], "text_2": ["b", LONG]}, "text_1.1", CONTEXT_LENGTH + 5),
        (RERANK, {"model": EMBEDDER, "query": LONG}, "query", CONTEXT_LENGTH + 5),
        (RERANK, {"model": EMBEDDER, "documents": ["a", LONG]}, "documents.1", None),
        (RERANK, {"model": TEMPLATED, "documents": ["a", LONG]}, "documents.1", None),
        (SCORE, {"text_1": ["a", LONG], "text_2": ["b", "c"]}, "text_1.1", None),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c", LONG]}, "text_2.1", None),
        (CLASSIFY, {"input": [["a", "b"], ["a", LONG]]}, "input.1", CONTEXT_LENGTH + 4),
        (SCORE, {"model": EMBEDDER, "text_1": ["a", LONG], "text_2": ["b", "c"]}, "text_1.1", None),
    ],
)
async def test_a_text_that_is_too_long_is_named(
    serving: Serving,
    http: httpx.AsyncClient,
    path: str,
    fields: dict[str, Any],
    param: str,
    length: int | None,
) -> None:
    """With its length and the model's."""
    error = await refused(http, path, fields, "context_length_exceeded")
    assert error["param"] == param
    assert f"maximum context length is {CONTEXT_LENGTH} tokens" in error["message"]
    assert length is None or f"{param} has {length} tokens" in error["message"]


async def test_a_query_that_is_repeated_too_often_is_refused(
    serving: Serving, http: httpx.AsyncClient
) -> None:
    """Before its pairs are tokenised, which would take a minute."""
    documents = ["a"] * 2000
    error = await refused(http, RERANK, {"query": "x" * 100_000, "documents": documents})
    assert error["param"] == "documents"
    assert "200008000 characters, over 4194304" in error["message"]


@pytest.mark.parametrize(
    ("model", "answered"),
    [
        (MODEL, ["/v1/chat/completions", "/v1/completions", "/v1/responses"]),
        (EMBEDDER, [EMBEDDINGS, SCORE, RERANK]),
        (RERANKER, [RERANK, SCORE]),
        (CLASSIFIER, [CLASSIFY]),
        (GRADER, [RERANK, SCORE, CLASSIFY]),
    ],
)
async def test_a_model_is_asked_only_for_what_it_can(
    serving: Serving, http: httpx.AsyncClient, model: str, answered: list[str]
) -> None:
    """Other calls are refused with what it can; /v1/models shows it too."""
    calls = GOOD | {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
    }
    for path in calls.keys() - set(answered):
        answer = await http.post(path, json=calls[path] | {"model": model})
        assert answer.status_code == 400, answer.text
        message = f"the model {model!r} does not answer {path}: it answers {', '.join(answered)}"
        assert answer.json()["error"] == {
            "message": message,
            "type": "invalid_request_error",
            "param": "model",
            "code": "unsupported_endpoint",
        }
    shown = (await http.get(f"/v1/models/{model}")).json()
    assert shown["endpoints"] == answered
    assert (shown["pooling"] is None) == (model == MODEL)


async def test_models_show_what_they_compute(serving: Serving, http: httpx.AsyncClient) -> None:
    """Their kind, sizes, instructions and labels."""
    shown = {name: (await http.get(f"/v1/models/{name}")).json() for name in (EMBEDDER, CLASSIFIER)}
    assert shown[EMBEDDER]["pooling"] == {
        "kind": "embedding",
        "num_outputs": 8,
        "dimensions": [2, 4],
        "input_types": ["clustering", "document", "query"],
        "labels": [],
    }
    assert shown[CLASSIFIER]["pooling"]["labels"] == ["bad", "fair", "good"]
