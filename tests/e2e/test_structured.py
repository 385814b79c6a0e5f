"""Output of the demo model constrained to a schema, through the official client."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pydantic
import pytest

from tests.e2e.questions import MODEL
from tests.infra.stack import Stack

pytestmark = [pytest.mark.e2e]


class Answer(pydantic.BaseModel):
    """The schema."""

    number: int = pydantic.Field(ge=0, le=999)
    colour: Literal["red", "green"]
    words: list[Literal["a", "bc"]] = pydantic.Field(max_length=3)


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        can = client.models.retrieve(MODEL).to_dict()["capabilities"]
        if not can["structured_output"]:  # type: ignore[index]
            pytest.skip("this engine takes no grammars")
        yield client


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_client_parses_each_of_several_choices(client: openai.OpenAI, temperature: int) -> None:
    """Greedy and sampled. The client raises if an output does not match the schema."""
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 2 + 3?"}],
        response_format=Answer,
        temperature=temperature,
        seed=3,
        n=4,
    )

    assert all(isinstance(choice.message.parsed, Answer) for choice in answer.choices)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_a_stream_is_constrained(client: openai.OpenAI) -> None:
    """Its pieces join to an object, and the stream ends with the object."""
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 2 + 3?"}],
        response_format=Answer,
        temperature=1,
        seed=4,
    ) as stream:
        answer = stream.get_final_completion()

    assert answer.choices[0].finish_reason == "stop"
    assert Answer.model_validate(json.loads(answer.choices[0].message.content or "")).words != [""]


def test_an_output_cut_by_max_tokens_ends_with_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 2 + 3?"}],
        max_tokens=5,
        extra_body={"guided_regex": "[a-z]{50}"},
    )

    assert answer.choices[0].finish_reason == "length"


def test_constrained_and_free_calls_share_batches(client: openai.OpenAI) -> None:
    """Each has the answer of the call alone."""

    def ask(choice: list[str]) -> str | None:
        extra = {"guided_choice": choice} if choice else {}
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count from 17 to 23."}],
            temperature=0,
            extra_body=extra,
        )
        return answer.choices[0].message.content

    choices = [["one", "two"], [], ["blue"], []]
    alone = [ask(choice) for choice in choices]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, choices * 2))

    assert together == alone * 2
    assert alone[2] == "blue"
