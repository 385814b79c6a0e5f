"""Calls that ask that long prompts are cut, over HTTP: what the worker gets, what usage says."""

from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.keys import Keys
from contract.model_cards import ModelCard
from tests.fakes import BOS_ID, EOS_ID
from tests.fleet import until
from tests.gateway.conftest import Serving, answered, error_of
from tests.gateway.fake_worker import CONTEXT_LENGTH, MODEL, FakeWorker, publish_model
from tests.gateway.vector_worker import CLASSIFIER, EMBEDDER, OF_PAIRS, PLAIN, RERANKER, TEMPLATED
from tests.gateway.vector_worker import CONTEXT_LENGTH as VECTOR_LENGTH

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
SCORE, CLASSIFY = "/v1/score", "/v1/classify"
LONG = "".join(chr(ord("a") + number % 26) for number in range(600))
BEGIN, END = [BOS_ID], [EOS_ID]


def chat(text: str = LONG) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]}


def asked_of(worker: FakeWorker) -> list[list[int]]:
    """The prompts of its latest job."""
    return [list(prompt) for prompt in worker.seen[-1].prompts]


@pytest.mark.parametrize(
    ("fields", "size", "keeps_end"),
    [
        ({"truncate_prompt_tokens": 40}, 40, True),
        ({"truncate_prompt_tokens": 40, "truncation_side": "left"}, 40, True),
        ({"truncate_prompt_tokens": 40, "truncation_side": "right"}, 40, False),
        ({"truncate_prompt_tokens": -1}, CONTEXT_LENGTH - 16, True),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, CONTEXT_LENGTH - 100, True),
        ({"truncate_prompt_tokens": -1, "max_tokens": 10**6 // 50}, CONTEXT_LENGTH - 16, True),
        ({"truncate_prompt_tokens": CONTEXT_LENGTH - 20}, CONTEXT_LENGTH - 20, True),
    ],
)
@pytest.mark.parametrize("kind", ["chat", "text", "ids", "list"])
async def test_a_long_prompt_is_cut_if_the_call_asks(
    worker: FakeWorker,
    http: httpx.AsyncClient,
    kind: str,
    fields: dict[str, Any],
    size: int,
    keeps_end: bool,
) -> None:
    """Chats, texts, token ids and lists of them; usage tells how much was cut off."""
    if kind == "chat":
        path, body, whole = CHAT, chat(), f"user: {LONG}\nassistant: "
    else:
        prompts = {"text": LONG, "ids": list(LONG.encode()), "list": [LONG, "short"]}
        path, body, whole = COMPLETIONS, {"model": MODEL, "prompt": prompts[kind]}, LONG
    answer = await answered(http, path, body, **fields)
    expected = list(whole.encode())[-size:] if keeps_end else list(whole.encode())[:size]
    assert asked_of(worker)[0] == expected
    assert answer["usage"]["truncated_tokens"] == len(whole) - size
    assert answer["usage"]["prompt_tokens"] == sum(map(len, asked_of(worker)))


async def test_without_a_wish_nothing_is_cut(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """A long prompt is refused; usage says nothing of a cut, unless it was asked for in vain."""
    refused = await http.post(CHAT, json=chat())
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "truncated_tokens" not in (await answered(http, CHAT, chat("a")))["usage"]
    answer = await answered(http, CHAT, chat("a"), truncate_prompt_tokens=100)
    assert answer["usage"]["truncated_tokens"] == 0


async def test_impossible_wishes_are_refused(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    for number in (0, -2, 1.5, CONTEXT_LENGTH + 1):
        answer = await http.post(CHAT, json=chat() | {"truncate_prompt_tokens": number})
        assert error_of(answer)[:2] == (400, "truncate_prompt_tokens"), number
    answer = await http.post(CHAT, json=chat() | {"truncation_side": "up"})
    assert error_of(answer)[:2] == (400, "truncation_side")


async def test_jobs_streams_and_quotes_cut_too(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    body = chat() | {"truncate_prompt_tokens": 40}
    quote = await answered(http, "/v1/quote", {"endpoint": CHAT, "body": body})
    assert quote["prompt_tokens"] == 40
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    assert '"truncated_tokens":578' in (await http.post(CHAT, json=streamed)).text
    job = (await http.post("/v1/jobs", json={"endpoint": CHAT, "body": body})).json()

    async def has_ended() -> bool:
        shown = (await http.get(f"/v1/jobs/{job['id']}")).json()
        return bool(shown["usage"]["truncated_tokens"] == 578 and shown["status"] == "succeeded")

    await until(has_ended)


async def test_a_model_may_cut_by_default(
    worker: FakeWorker, http: httpx.AsyncClient, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Unless the call says otherwise, also in responses, which have no parameter for it."""
    card: ModelCard = await publish_model(redis_client, keys, MODEL, truncates=True)

    async def is_cut() -> bool:
        return (await http.post(CHAT, json=chat())).status_code == 200

    assert card.truncates
    await until(is_cut)
    assert len(asked_of(worker)[0]) == CONTEXT_LENGTH - 16
    answer = await answered(http, CHAT, chat(), truncate_prompt_tokens=7)
    assert answer["usage"]["prompt_tokens"] == 7
    response = await answered(http, "/v1/responses", {"model": MODEL, "input": LONG})
    assert response["usage"]["truncated_tokens"] == 618 - (CONTEXT_LENGTH - 16)
    await publish_model(redis_client, keys, MODEL)


def texts(text: str) -> list[int]:
    return list(text.encode())


SIZE = 20
_CUT_END = [{"truncate": "END"}, {"truncate": True}, {"truncate_prompt_tokens": -1}]
_CUT_START = [
    {"truncate": "START"},
    {"truncate_prompt_tokens": -1, "truncation_side": "left"},
    {"truncate": "START", "truncate_prompt_tokens": VECTOR_LENGTH},
]


@pytest.mark.parametrize("fields", _CUT_END + _CUT_START)
@pytest.mark.parametrize("model", [PLAIN, EMBEDDER])
async def test_a_long_text_is_cut_to_the_model_and_keeps_its_instruction(
    serving: Serving, http: httpx.AsyncClient, model: str, fields: dict[str, Any]
) -> None:
    """And its special tokens; only that text is cut."""
    worker = await serving(model)
    answer = await answered(http, EMBEDDINGS, {"model": model, "input": [LONG, "ab"]}, **fields)
    instruction = "" if model == PLAIN else "C: "
    room = VECTOR_LENGTH - 2 - len(instruction)
    left = LONG[-room:] if fields in _CUT_START else LONG[:room]
    assert asked_of(worker) == [
        BEGIN + texts(instruction + left) + END,
        BEGIN + texts(instruction + "ab") + END,
    ]
    assert answer["usage"]["truncated_tokens"] == len(LONG) - room
    for nothing in ({"truncate": "NONE"}, {"truncate": False}, {}):
        refused = await http.post(EMBEDDINGS, json={"model": model, "input": LONG} | nothing)
        assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_token_ids_of_an_input_are_cut(serving: Serving, http: httpx.AsyncClient) -> None:
    worker = await serving(EMBEDDER)
    body = {"model": EMBEDDER, "input": [list(range(100)), [1]], "truncate": "END"}
    answer = await answered(http, EMBEDDINGS, body)
    assert asked_of(worker) == [list(range(VECTOR_LENGTH)), [1]]
    assert answer["usage"]["truncated_tokens"] == 100 - VECTOR_LENGTH


async def test_one_long_document_of_many_does_not_fail_the_call(
    serving: Serving, http: httpx.AsyncClient
) -> None:
    """Of 2,048; the others are as they were, and the answer has the whole document."""
    worker = await serving(RERANKER)
    documents = [f"{number}" for number in range(2_047)] + [LONG]
    body = {"model": RERANKER, "query": "q", "documents": documents, "return_documents": True}
    refused = await http.post(RERANK, json=body)
    assert refused.json()["error"]["param"] == "documents.2047"
    answer = await answered(http, RERANK, body, truncate="END")
    *others, cut = asked_of(worker)
    assert others == [BEGIN + texts("I: q") + END + texts(text) + END for text in documents[:-1]]
    room = VECTOR_LENGTH - len("I: q") - 3
    assert cut == BEGIN + texts("I: q") + END + texts(LONG[:room]) + END
    assert answer["usage"]["truncated_tokens"] == len(LONG) - room
    assert {each["document"]["text"] for each in answer["results"]} == set(documents)


async def test_each_call_for_pairs_cuts_them(serving: Serving, http: httpx.AsyncClient) -> None:
    """Scores and classes, of a reranker, of an embedding model and of a classifier of pairs."""
    workers = {model: await serving(model) for model in (RERANKER, EMBEDDER, OF_PAIRS, CLASSIFIER)}
    for model, path, body in (
        (RERANKER, SCORE, {"text_1": "q", "text_2": [LONG, "a"]}),
        (EMBEDDER, SCORE, {"text_1": LONG, "text_2": [LONG, "a"]}),
        (EMBEDDER, RERANK, {"query": "q", "documents": [LONG, "a"]}),
        (OF_PAIRS, CLASSIFY, {"input": [[LONG, LONG], ["a", "b"]]}),
        (CLASSIFIER, CLASSIFY, {"input": [LONG]}),
    ):
        assert (await http.post(path, json=body | {"model": model})).status_code == 400
        answer = await answered(http, path, body | {"model": model}, truncate="END")
        lengths = [len(prompt) for prompt in asked_of(workers[model])]
        assert max(lengths) == VECTOR_LENGTH, (model, path)
        assert answer["usage"]["truncated_tokens"] > 0


@pytest.mark.parametrize("side", ["START", "END"])
async def test_the_form_of_a_pair_stays_whole(
    serving: Serving, http: httpx.AsyncClient, side: str
) -> None:
    """A model has its own form of pairs: only the document is cut."""
    worker = await serving(TEMPLATED)
    body = {"model": TEMPLATED, "query": "q", "documents": ["a", LONG], "truncate": side}
    answer = await answered(http, RERANK, body)
    form = "<system>judge<query>q<document>"
    room = VECTOR_LENGTH - len(form)
    left = LONG[-room:] if side == "START" else LONG[:room]
    assert asked_of(worker) == [texts(f"{form}a"), texts(f"{form}{left}")]
    assert answer["usage"]["truncated_tokens"] == len(LONG) - room
    refused = await http.post(RERANK, json=body | {"query": "q" * 100})
    assert refused.json()["error"]["param"] == "query"


@pytest.mark.parametrize("model", [RERANKER, EMBEDDER, TEMPLATED])
async def test_documents_are_read_to_so_many_tokens(
    serving: Serving, http: httpx.AsyncClient, model: str
) -> None:
    """Cohere's limit of each document, without their special tokens, and vLLM's of second texts."""
    worker = await serving(model)
    body = {"model": model, "query": "q", "documents": ["abc", "a" * 50]}
    answer = await answered(http, RERANK, body, max_tokens_per_doc=5)
    assert answer["usage"]["truncated_tokens"] == 45
    assert [prompt.count(ord("a")) for prompt in asked_of(worker)][-2:] in ([1, 5], [2, 6])
    score = {"model": model, "text_1": "q", "text_2": ["abc", "a" * 50]}
    answer = await answered(http, SCORE, score, max_tokens_per_doc=5)
    assert answer["usage"]["truncated_tokens"] == 45
    answer = await answered(http, RERANK, body | {"documents": ["abc"]}, max_tokens_per_doc=0)
    assert "truncated_tokens" not in answer["usage"]


async def test_contradictions_and_too_little_room_are_refused(
    serving: Serving, http: httpx.AsyncClient
) -> None:
    await serving(EMBEDDER)
    body = {"model": EMBEDDER, "input": LONG}
    for fields, param in (
        ({"truncate": "NONE", "truncate_prompt_tokens": 5}, "truncate"),
        ({"truncate": "END", "truncation_side": "left"}, "truncation_side"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"truncate_prompt_tokens": VECTOR_LENGTH + 1}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 5}, "input"),
    ):
        answer = await http.post(EMBEDDINGS, json=body | fields)
        assert error_of(answer)[:2] == (400, param), fields
