"""LiteLLM's SDK."""

import importlib.metadata
import json

import litellm
from exercises import (
    ARGUMENTS,
    BASE_URL,
    KEY,
    LONG_SUM,
    LONG_TOTAL,
    MODEL,
    QUESTION,
    RESPONSE_FORMAT,
    SUM,
    TOOL,
    fits,
    main,
    refused,
    says,
    works,
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


@works("completion")
def completion():
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="1, 2, 3,", max_tokens=5, **SERVER
    )
    assert answer.choices[0].text


@works("ContextWindowExceededError")
def too_long():
    try:
        chat([{"role": "user", "content": "a" * 5_000}])
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no error")


@works("NotFoundError")
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


@refused("embeddings")
def embeddings():
    litellm.embedding(model=f"openai/{MODEL}", input=["a"], **SERVER)


main(importlib.metadata.version("litellm"))
