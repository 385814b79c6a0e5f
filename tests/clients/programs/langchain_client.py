"""LangChain's ChatOpenAI and OpenAI."""

import asyncio
import importlib.metadata

from exercises import BASE_URL, KEY, MODEL, QUESTION, main, refused, says, works
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

OPTIONS = {"base_url": BASE_URL, "api_key": KEY, "model": MODEL, "temperature": 0}
chat = ChatOpenAI(max_retries=0, **OPTIONS)
llm = OpenAI(max_retries=0, max_tokens=5, **OPTIONS)


class Sum(BaseModel):
    """A sum."""

    value: int = Field(ge=0, le=99)


@works("chat")
def whole():
    says(chat.invoke(QUESTION).content)


@works("chat stream")
def stream():
    says("".join(chunk.content for chunk in chat.stream(QUESTION)))


@works("chat, asyncio")
def asynchronous():
    says(asyncio.run(chat.ainvoke(QUESTION)).content)


@works("batch of chats")
def batch():
    for answer in chat.batch([QUESTION] * 4):
        says(answer.content)


@works("completion")
def completion():
    assert llm.invoke("1, 2, 3,").startswith(" 4")


@works("completion stream")
def completion_stream():
    assert "".join(llm.stream("1, 2, 3,")).startswith(" 4")


@works("batch of completions")
def completions():
    assert [text[:2] for text in llm.batch(["1, 2, 3,", "4, 5, 6,"])] == [" 4", " 7"]


@refused("tools")
def tools():
    chat.bind_tools([Sum]).invoke(QUESTION)


@works("structured output")
def structured():
    answer = chat.with_structured_output(Sum, method="json_schema").invoke(QUESTION)
    assert isinstance(answer, Sum), answer


main(importlib.metadata.version("langchain-openai"))
