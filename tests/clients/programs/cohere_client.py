"""Cohere's client."""

import asyncio

import cohere
from exercises import (
    DOCUMENTS,
    KEY,
    QUESTION,
    RERANKER,
    URL,
    error_of,
    main,
    ranks,
    refused,
    works_on_demo,
)

client = cohere.ClientV2(api_key=KEY, base_url=URL)
ASKED = {"model": RERANKER, "query": QUESTION, "documents": DOCUMENTS}


@works_on_demo("rerank")
def rerank():
    results = client.rerank(**ASKED).results
    ranks(result.index for result in results)
    scores = [result.relevance_score for result in results]
    assert scores == sorted(scores, reverse=True), scores
    assert client.rerank(**ASKED, top_n=2).results == results[:2]


@works_on_demo("rerank, asyncio")
def asynchronous():
    other = cohere.AsyncClientV2(api_key=KEY, base_url=URL)
    ranks(result.index for result in asyncio.run(other.rerank(**ASKED)).results)


@works_on_demo("rerank, version 1")
def version_1():
    ranks(r.index for r in cohere.Client(api_key=KEY, base_url=URL).rerank(**ASKED).results)


@works_on_demo("rerank of documents cut by `max_tokens_per_doc`")
def cut():
    long = {**ASKED, "documents": ["a" * 1_000, "b"]}
    refusal = error_of(cohere.BadRequestError, lambda: client.rerank(**long))
    assert refusal.body["error"]["code"] == "context_length_exceeded", refusal
    answer = client.rerank(**long, max_tokens_per_doc=50)
    same = client.rerank(**{**ASKED, "documents": ["a" * 50, "b"]})
    assert answer.results == same.results, (answer, same)


@refused("chat")
def chat():
    client.chat(model=RERANKER, messages=[{"role": "user", "content": QUESTION}])


@refused("embed")
def embed():
    client.embed(model=RERANKER, texts=["a"], input_type="search_query", embedding_types=["float"])


main(cohere.__version__)
