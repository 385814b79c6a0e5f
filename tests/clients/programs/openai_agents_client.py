"""openai-agents over chat completions."""

import asyncio
import importlib.metadata

import agents
import openai
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
)
from pydantic import BaseModel

agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
chat = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
loop = asyncio.Runner()  # one for all: the client keeps its connections
SETTINGS = agents.ModelSettings(temperature=0)
agent = agents.Agent(name="a", model=chat, model_settings=SETTINGS)


class Sum(BaseModel):
    """A sum."""

    value: int


@agents.function_tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@works("chat")
def whole():
    says(loop.run(agents.Runner.run(agent, QUESTION)).final_output)


@works("chat stream")
def stream():
    async def ask():
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    says(loop.run(ask()))


@works("tools")
def tools():
    able = agents.Agent(name="a", model=chat, model_settings=SETTINGS, tools=[add])
    assert int(loop.run(agents.Runner.run(able, LONG_SUM)).final_output) == LONG_TOTAL


@works("structured output")
def structured():
    able = agents.Agent(name="a", model=chat, model_settings=SETTINGS, output_type=Sum)
    assert loop.run(agents.Runner.run(able, SUM)).final_output == Sum(value=TOTAL)


@works("Responses API, tools")
def responses():
    model = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
    able = agents.Agent(name="a", model=model, model_settings=SETTINGS, tools=[add])
    assert int(loop.run(agents.Runner.run(able, LONG_SUM)).final_output) == LONG_TOTAL


main(importlib.metadata.version("openai-agents"))
