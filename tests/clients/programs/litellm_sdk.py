"""LiteLLM's SDK."""

import importlib.metadata

import litellm
from exercises import (
    BASE_URL,
    KEY,
    MODEL,
    QUESTION,
    RESPONSE_FORMAT,
    fits,
    main,
    refused,
    says,
    works,
)

SERVER = {"api_base": BASE_URL, "api_key": KEY, "num_retries": 0}
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


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


@refused("tools")
def tools():
    chat(tools=[TOOL])


@works("structured output")
def structured():
    fits(chat(response_format=RESPONSE_FORMAT).choices[0].message.content)


@refused("embeddings")
def embeddings():
    litellm.embedding(model=f"openai/{MODEL}", input=["a"], **SERVER)


main(importlib.metadata.version("litellm"))
