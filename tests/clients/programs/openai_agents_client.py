"""openai-agents over chat completions."""

import asyncio
import importlib.metadata

import agents
import openai
from exercises import BASE_URL, KEY, MODEL, QUESTION, main, refused, says, works

agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
chat = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
loop = asyncio.Runner()  # one for all: the client keeps its connections
SETTINGS = agents.ModelSettings(temperature=0)
agent = agents.Agent(name="a", model=chat, model_settings=SETTINGS)


@agents.function_tool
def double(value: int) -> int:
    """Doubles."""
    return 2 * value


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


@refused("tools")
def tools():
    able = agents.Agent(name="a", model=chat, tools=[double])
    loop.run(agents.Runner.run(able, QUESTION))


@refused("Responses API")
def responses():
    model = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
    loop.run(agents.Runner.run(agents.Agent(name="a", model=model), QUESTION))


main(importlib.metadata.version("openai-agents"))
