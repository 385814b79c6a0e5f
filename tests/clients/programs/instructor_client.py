"""instructor. The demo model knows no tool but its own: the value of a forced call is arbitrary."""

import importlib.metadata

import instructor
import openai
from exercises import BASE_URL, KEY, MODEL, SUM, TOTAL, main, works
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
MESSAGES = [{"role": "user", "content": SUM}]


class Sum(BaseModel):
    """A sum."""

    value: int = Field(ge=0, le=198)


def ask(mode):
    return instructor.from_openai(client, mode=mode).create(
        model=MODEL, messages=MESSAGES, response_model=Sum, temperature=0, max_retries=0
    )


@works("plain text")
def text():
    answer = instructor.from_openai(client, mode=instructor.Mode.MD_JSON).create(
        model=MODEL, messages=MESSAGES, response_model=None, temperature=0
    )
    assert answer.choices[0].message.content.strip() == str(TOTAL), answer


@works("tools")
def tools():
    assert isinstance(ask(instructor.Mode.TOOLS), Sum)


@works("tools, strict")
def strict_tools():
    assert isinstance(ask(instructor.Mode.TOOLS_STRICT), Sum)


@works("structured output")
def structured():
    assert ask(instructor.Mode.JSON_SCHEMA).value == TOTAL


main(importlib.metadata.version("instructor"))
