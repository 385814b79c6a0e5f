"""LangChain's ChatOpenAI and OpenAI."""

import asyncio
import importlib.metadata

import tiktoken
from exercises import (
    ARGUMENTS,
    BASE_URL,
    EMBEDDER,
    KEY,
    LONG_SUM,
    LONG_TOTAL,
    MODEL,
    QUESTION,
    REPEATED,
    SUM,
    TOTAL,
    is_cached,
    main,
    refused,
    says,
    works,
    works_on_demo,
)
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

OPTIONS = {"base_url": BASE_URL, "api_key": KEY, "model": MODEL, "temperature": 0}
chat = ChatOpenAI(max_retries=0, **OPTIONS)
llm = OpenAI(max_retries=0, max_tokens=5, **OPTIONS)


class Sum(BaseModel):
    """A sum."""

    value: int = Field(ge=0, le=198)


@works("chat")
def whole():
    says(chat.invoke(QUESTION).content)


@works("chat stream")
def stream():
    says("".join(chunk.content for chunk in chat.stream(QUESTION)))


@works_on_demo("cached tokens")
def cached():
    chat.invoke(REPEATED)
    used = chat.invoke(REPEATED).usage_metadata
    is_cached(used["input_token_details"]["cache_read"], used["input_tokens"])
    chunks = chat.stream(REPEATED, stream_usage=True)
    assert [c.usage_metadata for c in chunks if c.usage_metadata] == [used]


@works("chat, asyncio")
def asynchronous():
    says(asyncio.run(chat.ainvoke(QUESTION)).content)


@works("batch of chats")
def batch():
    for answer in chat.batch([QUESTION] * 4):
        says(answer.content)


@works_on_demo("completion")
def completion():
    assert llm.invoke("1, 2, 3,").startswith(" 4")


@works_on_demo("completion stream")
def completion_stream():
    assert "".join(llm.stream("1, 2, 3,")).startswith(" 4")


@works_on_demo("batch of completions")
def completions():
    assert [text[:2] for text in llm.batch(["1, 2, 3,", "4, 5, 6,"])] == [" 4", " 7"]


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@works("tools")
def tools():
    able, messages = chat.bind_tools([add]), [HumanMessage(LONG_SUM)]
    asked = able.invoke(messages)
    results = [add.invoke(call) for call in asked.tool_calls]
    assert int(able.invoke([*messages, asked, *results]).content) == LONG_TOTAL


@works("tools, streamed")
def streamed_tools():
    whole = None
    for chunk in chat.bind_tools([add]).stream(LONG_SUM):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == [ARGUMENTS], whole


@works("structured output")
def structured():
    answer = chat.with_structured_output(Sum, method="json_schema").invoke(SUM)
    assert answer == Sum(value=TOTAL), answer


@works("structured output by a call")
def structured_call():
    answer = chat.with_structured_output(Sum, method="function_calling").invoke(SUM)
    assert isinstance(answer, Sum), answer  # a forced call of a tool that the model does not know


def embed(**options):
    embedder = OpenAIEmbeddings(
        base_url=BASE_URL, api_key=KEY, model=EMBEDDER, max_retries=0, **options
    )
    one, other = embedder.embed_documents(["A text.", "Another."])
    assert len(one) == len(other) > 1
    assert embedder.embed_query("A text.") == one


@works_on_demo("embeddings with `check_embedding_ctx_length=False`")
def embeddings():
    embed(check_embedding_ctx_length=False)


@refused("embeddings without `check_embedding_ctx_length=False`")
def foreign_ids():
    # By default the client sends ids of OpenAI's tokenizer. Its file is on the Internet.
    pieces = {bytes([byte]): 50_000 + byte for byte in range(256)}
    encoding = tiktoken.Encoding(
        "cl100k_base", pat_str=r"\S+|\s+", mergeable_ranks=pieces, special_tokens={}
    )
    tiktoken.get_encoding = lambda _: encoding
    embed()


main(importlib.metadata.version("langchain-openai"))
