"""Anthropic's official client."""

import asyncio
import importlib.metadata

import anthropic
from exercises import (
    ARGUMENTS,
    KEY,
    LONG_SUM,
    LONG_TOTAL,
    MODEL,
    QUESTION,
    REPEATED,
    SUM,
    TOOL,
    TOTAL,
    URL,
    error_of,
    is_cached,
    main,
    refused,
    says,
    works,
    works_on_demo,
    works_reasoning,
)
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
FUNCTION = TOOL["function"]
ADD = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
SETTINGS = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}


class Sum(BaseModel):
    value: int


def turn(content, role="user"):
    return {"role": role, "content": content}


def ask(question=QUESTION, **fields):
    return client.messages.create(messages=[turn(question)], **SETTINGS, **fields)


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


@works("message")
def whole():
    message = ask(
        system=[{"type": "text", "text": "Count.", "cache_control": {"type": "ephemeral"}}]
    )
    says(text_of(message))
    assert (message.stop_reason, message.role) == ("end_turn", "assistant")
    assert message.usage.input_tokens > 0 < message.usage.output_tokens
    assert message._request_id


@works("message stream")
def stream():
    with client.messages.stream(messages=[turn(QUESTION)], **SETTINGS) as events:
        says("".join(events.text_stream))
        final = events.get_final_message()
    assert final.usage.output_tokens > 0
    assert final.stop_reason == "end_turn"


@works_on_demo("cached tokens")
def cached():
    ask(REPEATED)
    usage = ask(REPEATED).usage
    is_cached(usage.cache_read_input_tokens, usage.cache_read_input_tokens + usage.input_tokens)
    with client.messages.stream(messages=[turn(REPEATED)], **SETTINGS) as events:
        streamed = events.get_final_message().usage
    counts = [(u.input_tokens, u.cache_read_input_tokens) for u in (usage, streamed)]
    assert counts[0] == counts[1], counts


@works("message, asyncio")
def awaited():
    async def answer():
        async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY) as own:
            return await own.messages.create(messages=[turn(QUESTION)], **SETTINGS)

    says(text_of(asyncio.run(answer())))


@works("stop sequences")
def stops():
    message = ask(stop_sequences=[", 3", ", 4"])
    assert text_of(message).strip() == "1, 2"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ", 3")


@works("tokens counted")
def counted():
    messages = [turn(QUESTION)]
    number = client.messages.count_tokens(model=MODEL, messages=messages, tools=[ADD])
    usage = ask(tools=[ADD]).usage
    assert number.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def works_through(message):
    """The answer to the result of the message's one call."""
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert (message.stop_reason, call.input) == ("tool_use", ARGUMENTS)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": str(LONG_TOTAL)}
    messages = [turn(LONG_SUM), turn(message.content, "assistant"), turn([result])]
    final = client.messages.create(messages=messages, tools=[ADD], **SETTINGS)
    assert int(text_of(final)) == LONG_TOTAL


@works("tools")
def tools():
    works_through(ask(LONG_SUM, tools=[ADD]))


@works("tools, streamed")
def tools_streamed():
    messages = [turn(LONG_SUM)]
    with client.messages.stream(messages=messages, tools=[ADD], **SETTINGS) as events:
        works_through(events.get_final_message())


@works("tools, required")
def tools_required():
    works_through(ask(LONG_SUM, tools=[ADD], tool_choice={"type": "any"}))


@works("structured output, parsed")
def parsed():
    fields = SETTINGS | {"max_tokens": 100}
    message = client.messages.parse(messages=[turn(SUM)], output_format=Sum, **fields)
    assert message.parsed_output == Sum(value=TOTAL)


@works("errors")
def errors():
    fields = {**SETTINGS, "model": "none"}
    unknown = error_of(
        anthropic.NotFoundError,
        lambda: client.messages.create(messages=[turn("Hi")], **fields),
    )
    assert unknown.body["error"]["type"] == "not_found_error"
    long = error_of(anthropic.BadRequestError, lambda: ask("word " * 70_000))
    assert "prompt is too long" in str(long)


@works_reasoning("thinking, given back")
def thinking():
    message = ask(thinking={"type": "adaptive"})
    first, *_ = message.content
    assert (first.type, bool(first.thinking), bool(first.signature)) == ("thinking", True, True)
    assert message.usage.output_tokens_details.thinking_tokens > 0
    messages = [turn(QUESTION), turn(message.content, "assistant"), turn(QUESTION)]
    says(text_of(client.messages.create(messages=messages, **SETTINGS)))


@works_reasoning("thinking switched off")
def unthinking():
    message = ask(thinking={"type": "disabled"})
    assert [block.type for block in message.content] == ["text"]


@refused("prefill")
def prefill():
    client.messages.create(messages=[turn("Hi"), turn("It is", "assistant")], **SETTINGS)


main(importlib.metadata.version("anthropic"))
