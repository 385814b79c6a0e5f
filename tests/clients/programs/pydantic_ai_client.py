"""pydantic-ai."""

import asyncio
import importlib.metadata

from exercises import (
    BASE_URL,
    KEY,
    LONG_SUM,
    LONG_TOTAL,
    MODEL,
    QUESTION,
    SUM,
    TOTAL,
    main,
    says,
    works,
    works_reasoning,
)
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
agent = Agent(model, model_settings={"temperature": 0})


class Sum(BaseModel):
    """A sum."""

    value: int = Field(ge=0, le=198)


@works("chat")
def whole():
    says(agent.run_sync(QUESTION).output)


@works("chat stream")
def stream():
    async def ask():
        async with agent.run_stream(QUESTION) as result:
            return await result.get_output()

    says(asyncio.run(ask()))


@works("chat with a history")
def history():
    first = agent.run_sync(QUESTION)
    says(agent.run_sync(QUESTION, message_history=first.all_messages()).output)


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@works("tools")
def tools():
    able = Agent(model, tools=[add], model_settings={"temperature": 0})
    assert int(able.run_sync(LONG_SUM).output) == LONG_TOTAL


@works("structured output by a call")
def structured_call():
    able = Agent(model, output_type=Sum, model_settings={"temperature": 0})
    answer = able.run_sync(SUM).output
    assert isinstance(answer, Sum), answer  # a forced call of a tool that the model does not know


@works("structured output")
def structured():
    able = Agent(model, output_type=NativeOutput(Sum), model_settings={"temperature": 0})
    assert able.run_sync(SUM).output == Sum(value=TOTAL)


@works_reasoning("reasoning apart")
def reasoning():
    answer = agent.run_sync(QUESTION)
    says(answer.output)
    assert any(part.part_kind == "thinking" for part in answer.all_messages()[-1].parts)


main(importlib.metadata.version("pydantic-ai-slim"))
