"""pydantic-ai."""

import asyncio
import importlib.metadata

from exercises import BASE_URL, KEY, MODEL, QUESTION, main, refused, says, works
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
agent = Agent(model, model_settings={"temperature": 0})


class Sum(BaseModel):
    """A sum."""

    value: int = Field(ge=0, le=99)


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


@refused("tools")
def tools():
    def double(value: int) -> int:
        """Doubles."""
        return 2 * value

    Agent(model, tools=[double]).run_sync(QUESTION)


@works("structured output")
def structured():
    answer = Agent(model, output_type=NativeOutput(Sum)).run_sync(QUESTION).output
    assert isinstance(answer, Sum), answer


main(importlib.metadata.version("pydantic-ai-slim"))
