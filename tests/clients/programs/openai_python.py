"""The official client for Python."""

import asyncio
import json

import openai
import openai_batches  # noqa: F401 - its exercises
from exercises import (
    ANSWER,
    ARGUMENTS,
    BASE_URL,
    EMBEDDER,
    KEY,
    LONG_SUM,
    LONG_TOTAL,
    MODEL,
    QUESTION,
    REPEATED,
    RESPONSE_FORMAT,
    SUM,
    TOOL,
    TOTAL,
    error_of,
    fits,
    is_cached,
    main,
    refused,
    says,
    works,
    works_on_demo,
    works_reasoning,
)
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
SUMS = [{"role": "user", "content": SUM}]
ASKED = [{"role": "user", "content": LONG_SUM}]


class Sum(BaseModel):
    """A sum."""

    value: int = Field(ge=0, le=198)


def chat(**options):
    return client.chat.completions.create(
        model=MODEL, messages=options.pop("messages", MESSAGES), temperature=0, **options
    )


@works("chat")
def whole():
    says(chat().choices[0].message.content)


@works("chat stream with usage")
def stream():
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    says("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
    assert chunks[-1].usage.completion_tokens > 0


@works_on_demo("cached tokens")
def cached():
    asked = {"messages": [{"role": "user", "content": REPEATED}], "max_tokens": 1}
    chat(**asked)
    usage = chat(**asked).usage
    is_cached(usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens)
    *_, last = chat(**asked, stream=True, stream_options={"include_usage": True})
    assert last.usage == usage, last
    for _ in range(2):
        response = client.responses.create(model=MODEL, input=REPEATED, temperature=0)
    usage = response.usage
    is_cached(usage.input_tokens_details.cached_tokens, usage.input_tokens)


@works("chat, asyncio")
def asynchronous():
    async def ask():
        async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY) as other:
            answer = await other.chat.completions.create(
                model=MODEL, messages=MESSAGES, temperature=0
            )
            return answer.choices[0].message.content

    says(asyncio.run(ask()))


@works_on_demo("completion")
def completion():
    answer = client.completions.create(model=MODEL, prompt="1, 2, 3,", temperature=0, max_tokens=5)
    assert answer.choices[0].text.startswith(" 4"), answer


@works_on_demo("completion stream")
def completion_stream():
    chunks = client.completions.create(model=MODEL, prompt="1, 2, 3,", max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks)


@works("log probabilities")
def logprobs():
    tokens = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(tokens[0].top_logprobs) == 2


@works("n")
def several():
    assert len(chat(n=2).choices) == 2


@works("values that ask for nothing")
def nothing_asked():
    history = [*MESSAGES, {"role": "assistant", "content": None}, *MESSAGES]
    answer = chat(
        messages=history,
        tools=[],
        tool_choice="none",
        parallel_tool_calls=False,
        store=False,
        response_format={"type": "text"},
    )
    says(answer.choices[0].message.content)


@works("max_tokens over the context")
def clipped():
    says(chat(max_tokens=1_000_000).choices[0].message.content)


@works("ignored parameters are named")
def ignored():
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, user="me", prompt_cache_key="k"
    )
    assert answer.headers["x-ignored-parameters"] == "user"


@works("models")
def models():
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@works_on_demo("errors")
def errors():
    wrong = error_of(
        openai.NotFoundError,
        lambda: client.chat.completions.create(model="dem", messages=MESSAGES),
    )
    assert wrong.code == "model_not_found"
    assert "'demo'" in str(wrong)
    long = [{"role": "user", "content": "a" * 5_000}]
    too_long = error_of(openai.BadRequestError, lambda: chat(messages=long))
    assert too_long.code == "context_length_exceeded"
    typo = error_of(openai.BadRequestError, lambda: chat(extra_body={"max_token": 1}))
    assert "max_tokens" in str(typo)


@works("tools")
def tools():
    asked = chat(messages=ASKED, tools=[TOOL]).choices[0].message
    [call] = asked.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS, call
    result = {"role": "tool", "tool_call_id": call.id, "content": str(LONG_TOTAL)}
    answer = chat(messages=[*ASKED, asked, result], tools=[TOOL])
    assert int(answer.choices[0].message.content) == LONG_TOTAL


@works("tools, streamed")
def streamed_tools():
    with client.chat.completions.stream(
        model=MODEL, messages=ASKED, temperature=0, tools=[TOOL]
    ) as stream:
        deltas = [event for event in stream if "arguments.delta" in event.type]
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS, call
    # One by one, or several at once where a busy gateway was behind.
    assert "".join(event.arguments_delta for event in deltas) == call.function.arguments


@works("tools, required")
def required_tools():
    answer = chat(tools=[TOOL], tool_choice="required").choices[0].message
    assert answer.tool_calls[0].function.name == "add", answer


@works("structured output")
def structured():
    fits(chat(messages=SUMS, response_format=RESPONSE_FORMAT).choices[0].message.content)


@works("structured output, parsed")
def parsed():
    answer = client.chat.completions.parse(
        model=MODEL, messages=SUMS, temperature=0, response_format=Sum
    )
    assert answer.choices[0].message.parsed == Sum(value=TOTAL), answer


@refused("images")
def images():
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    chat(messages=[{"role": "user", "content": [part]}])


def ask(**options):
    return client.responses.create(model=MODEL, temperature=0, **{"input": QUESTION, **options})


@works("response")
def response():
    says(ask().output_text)


@works("response stream")
def response_stream():
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        says(stream.get_final_response().output_text)
    says(text)


@works("response in the background, polled and resumed at each event")
def background():
    asked = ask(background=True)
    while asked.status in ("queued", "in_progress"):
        asked = client.responses.retrieve(asked.id)
    says(asked.output_text)
    events = list(client.responses.retrieve(asked.id, stream=True))
    for number in range(len(events)):
        rest = client.responses.retrieve(asked.id, stream=True, starting_after=number)
        assert list(rest) == events[number + 1 :]


@works("background stream broken off and resumed")
def broken_stream():
    with ask(background=True, stream=True) as stream:
        first = [next(stream) for _ in range(3)]
    reply_id, last = first[0].response.id, first[-1].sequence_number
    with client.responses.stream(response_id=reply_id, starting_after=last) as stream:
        assert next(stream).sequence_number == last + 1
        says(stream.get_final_response().output_text)


@works("response with tools, in a chain")
def chain():
    tool = {"type": "function", "strict": False, **TOOL["function"]}
    asked = ask(input=LONG_SUM, tools=[tool])
    [call] = [item for item in asked.output if item.type == "function_call"]
    numbers = json.loads(call.arguments)
    total = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": str(numbers["a"] + numbers["b"]),
    }
    answer = ask(input=[total], tools=[tool], previous_response_id=asked.id)
    assert int(answer.output_text) == LONG_TOTAL


@works("response, parsed")
def response_parsed():
    parsed = client.responses.parse(model=MODEL, input=SUM, text_format=Sum, temperature=0)
    assert parsed.output_parsed == Sum(value=TOTAL)


@works("response cancelled, its items listed, deleted")
def lifecycle():
    asked = ask(background=True)
    client.responses.cancel(asked.id)
    assert client.responses.input_items.list(asked.id).data[0].content[0].text == QUESTION
    client.responses.delete(asked.id)
    error_of(openai.NotFoundError, lambda: client.responses.retrieve(asked.id))


@refused("conversations")
def conversations():
    ask(conversation="conv_1")


@works_on_demo("embeddings")
def embeddings():
    one, other = client.embeddings.create(model=EMBEDDER, input=[QUESTION, ANSWER]).data
    assert len(one.embedding) == len(other.embedding) > 1
    assert one.embedding != other.embedding


@works_reasoning("reasoning apart, with its tokens")
def reasoning():
    answer = chat()
    message, usage = answer.choices[0].message, answer.usage
    says(message.content)
    assert message.reasoning_content
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    says("".join(delta.content or "" for delta in deltas))
    streamed = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert streamed == message.reasoning_content
    assert chunks[-1].usage == usage


@works_reasoning("reasoning switched off")
def no_reasoning():
    answer = chat(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    message = answer.choices[0].message
    says(message.content)
    assert not getattr(message, "reasoning_content", None), message


@works_reasoning("response with its reasoning")
def response_reasoning():
    answer = ask()
    thought, message = answer.output
    assert (thought.type, message.type) == ("reasoning", "message")
    assert thought.content[0].text
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    says(answer.output_text)


main(openai.__version__)
