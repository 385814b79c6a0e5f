"""LiteLLM's SDK."""

import importlib.metadata
import json

import litellm
from exercises import (
    ARGUMENTS,
    BASE_URL,
    DOCUMENTS,
    EMBEDDER,
    KEY,
    LONG_SUM,
    LONG_TOTAL,
    MODEL,
    QUESTION,
    RERANKER,
    RESPONSE_FORMAT,
    SUM,
    TOOL,
    URL,
    fits,
    main,
    ranks,
    says,
    works,
    works_on_demo,
    works_reasoning,
)

SERVER = {"api_base": BASE_URL, "api_key": KEY, "num_retries": 0}
MESSAGES = [{"role": "user", "content": QUESTION}]


def chat(messages=MESSAGES, **options):
    return litellm.completion(
        model=f"openai/{MODEL}", messages=messages, temperature=0, **SERVER, **options
    )


@works("chat")
def whole():
    says(chat().choices[0].message.content)


@works("chat stream with usage")
def stream():
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    says("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))


@works("batch of chats")
def batch():
    answers = litellm.batch_completion(
        model=f"openai/{MODEL}", messages=[MESSAGES] * 4, temperature=0, **SERVER
    )
    for answer in answers:
        says(answer.choices[0].message.content)


@works_on_demo("completion")
def completion():
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="1, 2, 3,", max_tokens=5, **SERVER
    )
    assert answer.choices[0].text


@works_on_demo("ContextWindowExceededError")
def too_long():
    try:
        chat([{"role": "user", "content": "a" * 5_000}])
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no error")


@works_on_demo("NotFoundError")
def no_model():
    try:
        litellm.completion(model="openai/dem", messages=MESSAGES, **SERVER)
    except litellm.NotFoundError:
        return
    raise AssertionError("no error")


@works("tools")
def tools():
    messages = [{"role": "user", "content": LONG_SUM}]
    asked = chat(messages, tools=[TOOL]).choices[0].message
    [call] = asked.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS, call
    result = {"role": "tool", "tool_call_id": call.id, "content": str(LONG_TOTAL)}
    answer = chat([*messages, asked.model_dump(exclude_none=True), result], tools=[TOOL])
    assert int(answer.choices[0].message.content) == LONG_TOTAL


@works("structured output")
def structured():
    asked = [{"role": "user", "content": SUM}]
    fits(chat(asked, response_format=RESPONSE_FORMAT).choices[0].message.content)


@works_reasoning("reasoning apart")
def reasoning():
    message = chat().choices[0].message
    says(message.content)
    assert message.reasoning_content


@works_on_demo("embeddings")
def embeddings():
    answer = litellm.embedding(model=f"openai/{EMBEDDER}", input=["a", "b"], **SERVER)
    assert len(answer.data) == 2, answer


def rerank(provider, **options):
    answer = litellm.rerank(
        model=f"{provider}/{RERANKER}",
        query=QUESTION,
        documents=DOCUMENTS,
        api_base=URL,
        api_key=KEY,
        **options,
    )
    ranks(result["index"] for result in answer.results)
    return answer


@works_on_demo("rerank, as `hosted_vllm/`, `cohere/` and `jina_ai/`")
def rerank_with_documents():
    for provider in ("hosted_vllm", "cohere", "jina_ai"):
        for result in rerank(provider).results:
            assert result["document"]["text"] == DOCUMENTS[result["index"]], (provider, result)


@works_on_demo("rerank, as `infinity/` with `return_documents=False`")
def rerank_infinity():
    rerank("infinity", return_documents=False)


@works_on_demo("rerank of cut documents")
def rerank_cut():
    whole = scores(rerank("hosted_vllm"))
    for provider in ("hosted_vllm", "cohere"):
        cut = scores(rerank(provider, max_tokens_per_doc=5))
        assert cut[0] == whole[0], (provider, cut)  # a short one
        assert cut[2] != whole[2], (provider, cut)
    assert scores(rerank("hosted_vllm", truncate_prompt_tokens=30))[2] != whole[2]


def scores(answer):
    return {result["index"]: result["relevance_score"] for result in answer.results}


main(importlib.metadata.version("litellm"))
