"""instructor. The demo model can only repeat JSON, so it is asked to."""

import importlib.metadata

import instructor
import openai
from exercises import BASE_URL, KEY, MODEL, main, refused, works
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
MESSAGES = [{"role": "user", "content": "Repeat: 42"}]


class Sum(BaseModel):
    """A sum."""

    value: int = Field(ge=0, le=99)


def ask(mode):
    return instructor.from_openai(client, mode=mode).create(
        model=MODEL, messages=MESSAGES, response_model=Sum, temperature=0, max_retries=0
    )


@works("plain text")
def text():
    answer = instructor.from_openai(client, mode=instructor.Mode.MD_JSON).create(
        model=MODEL, messages=MESSAGES, response_model=None, temperature=0
    )
    assert answer.choices[0].message.content.strip() == "42", answer


@works("markdown JSON (request taken; the demo model writes no JSON)")
def markdown():
    try:
        ask(instructor.Mode.MD_JSON)
    except InstructorRetryException as exc:
        assert exc.last_completion is not None, exc


@refused("tools")
def tools():
    ask(instructor.Mode.TOOLS)


@works("structured output")
def structured():
    assert isinstance(ask(instructor.Mode.JSON_SCHEMA), Sum)


main(importlib.metadata.version("instructor"))
