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
# By path and by the place that the refusal names: values that its field may not have.
WRONG_INPUTS: dict[str, list[Any]] = {
    "input": [
        *(None, "", [], 7, {"text": "a"}, [1, "a"], [True], [1.0], [-1], [259]),
        *(["a"] * 2049, [[1]] * 2049),
    ],
    "input.0": [[""], [[[1]]]],
    "input.1": [
        *(["a", None], ["a", [1]], [[1], "a"], [[1], []], [[1], [True]], [[1], [1, 300]]),
        [[1], [2**63]],
    ],
    "input.2": [["a", "b", "", "c"]],
}
WRONG: dict[str, dict[str, list[Any]]] = {
    EMBEDDINGS: {
        "encoding_format": ["int8"],
        "dimensions": [0, 3, "4"],
        "input_type": ["passage"],
        "stream": [True],
        "truncate_prompt_tokens": [0],
        "inputs": [["a"]],
        "max_tokens": [4],
        "service_tier": ["scoring"],
        "input.0": [[["a", "b"]]],
    },
    CLASSIFY: {
        "dimensions": [4],
        "input": [[["a", "b"]] * 2049],
        "input.0": [[["a", 7]]],
        "input.1": [[["a", "b"], ["c"]], [["a", "b"], ["c", ""]], [["a", "b"], "c"]],
    },
    RERANK: {
        "query": ["", ["q"]],
        "documents": ["a", [], ["a"] * 2049],
        "documents.0": [[{"title": "a"}]],
        "documents.1": [["a", ""], ["a", {"text": ""}], ["a", 7]],
        "top_n": [-1],
        "return_documents": [1],
    },
    SCORE: {"text_1": [""], "text_2": [[]], "text_2.1": [["a", ""]]},
}
BAD: list[tuple[str, dict[str, Any], str]] = [
    *(
        (path, {param.partition(".")[0]: value}, param)
        for path, wrong in (*WRONG.items(), (EMBEDDINGS, WRONG_INPUTS), (CLASSIFY, WRONG_INPUTS))
        for param, values in wrong.items()
        for value in values
    ),
    (EMBEDDINGS, {"model": PLAIN, "dimensions": 4}, "dimensions"),
    (EMBEDDINGS, {"input": [1], "input_type": "query"}, "input_type"),
    (CLASSIFY, {"model": OF_PAIRS, "input": ["a", "b"]}, "input"),
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


TOLD: list[tuple[str, dict[str, Any], str]] = [
    (EMBEDDINGS, {"dimensions": 3}, "dimensions must be one of 2, 4, 8"),
    (
        EMBEDDINGS,
        {"model": PLAIN, "dimensions": 3},
        "dimensions: the model declares none; its embeddings have 8",
    ),
    (
        EMBEDDINGS,
        {"input_type": "passage"},
        "input_type must be one of clustering, document, query",
    ),
    (EMBEDDINGS, {"input": ["a"] * 2049}, "input: at most 2048 of them, not 2049"),
    (
        CLASSIFY,
        {"model": OF_PAIRS},
        "input: this model compares two texts: send pairs, [[text, text], …]",
    ),
    (
        SCORE,
        {"text_1": ["a", "b"], "text_2": "c"},
        "text_2: must be as many texts as text_1 has, 2, not 1",
    ),
    # LangChain sends ids of OpenAI's tokenizer, unless its caller knows.
    (
        EMBEDDINGS,
        {"input": [[1, 2], [9906, 1917]]},
        "input.1: token ids must be those of the model's own tokenizer, from 0 to 258",
    ),
]


async def test_refusals_tell_what_is_possible(serving: Serving, http: httpx.AsyncClient) -> None:
    """The declared dimensions and instructions, the most inputs, the lengths."""
    for path, fields, message in TOLD:
        assert (await refused(http, path, fields))["message"] == message


# Path, fields, the field that is too long, and its length if the message tells it.
TOO_LONG: list[tuple[str, dict[str, Any], str, int | None]] = [
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
]


@pytest.mark.parametrize("case", TOO_LONG)
async def test_a_text_that_is_too_long_is_named(
    serving: Serving, http: httpx.AsyncClient, case: tuple[str, dict[str, Any], str, int | None]
) -> None:
    """With its length and the model's."""
    path, fields, param, length = case
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
