"""Models of each family with their own tokenizers, templates and formats, end to end: real gateway,
Redis and workers, of which only the weights are replaced by a text to say."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from tests.real.callers import (
    answer_of,
    answer_of_items,
    ask,
    ask_streamed,
    body_of,
    respond,
    respond_streamed,
    run_batch,
    run_jobs,
)
from tests.real.cases import Case, cases_of
from tests.real.families import FAMILIES
from tests.real.parts import needs_parts
from tests.real.scripted import SAYS
from tests.real.server import Server, running_server

pytestmark = [pytest.mark.campaign, pytest.mark.e2e, needs_parts]

BY_NAME = {family.name: family for family in FAMILIES}
_AT_ONCE = 12


class Answers:
    """What one family's server answers to cases, each asked once."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._cases = cases_of(server.family)
        self._found: dict[str, dict[str, Any] | openai.APIError] = {}

    def _ask(self, case: Case) -> dict[str, Any] | openai.APIError:
        if case.title not in self._found:
            try:
                self._found[case.title] = ask(self.server, body_of(self.server, case))
            except openai.APIError as refused:
                self._found[case.title] = refused
        return self._found[case.title]

    def answered(self) -> list[Case]:
        """All cases that the server does not refuse."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = pool.map(self._ask, self._cases)
        pairs = zip(self._cases, found, strict=True)
        return [case for case, answer in pairs if isinstance(answer, dict)]

    def response(self, case: Case) -> dict[str, Any]:
        found = self._ask(case)
        assert isinstance(found, dict), found
        return found


@pytest.fixture(scope="session", params=BY_NAME)
def answers(
    request: pytest.FixtureRequest,
    real_redis: str,
    real_gateway: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Answers]:
    folder = tmp_path_factory.mktemp("real") / "model"
    with running_server(BY_NAME[request.param], folder, real_redis, real_gateway) as server:
        yield Answers(server)


def of_all_cases(test: Any) -> Any:
    """Parameters are names, by which pytest runs the tests of a family together."""
    cases = [(family, case) for family in FAMILIES for case in cases_of(family)]
    params = [
        pytest.param(
            family.name,
            case,
            id=f"{family.name}: {case.title}",
            marks=pytest.mark.long if number % 3 else (),
        )
        for number, (family, case) in enumerate(cases)
    ]
    return pytest.mark.parametrize(
        ("answers", "case"), params, indirect=["answers"], scope="session"
    )(test)


def of_two_families(test: Any) -> Any:
    """In CI: one whose formats are tags in the text, and harmony's channels."""
    params = [
        pytest.param(name, marks=() if name in ("qwen3", "gpt-oss") else pytest.mark.long)
        for name in BY_NAME
    ]
    return pytest.mark.parametrize("answers", params, indirect=True, scope="session")(test)


@of_all_cases
def test_a_model_is_understood(answers: Answers, case: Case) -> None:
    """Whole and streamed."""
    response = answers.response(case)
    found = answer_of(response)
    assert case.accepts(found), (found, case.expected)
    assert found.num_reasoning_tokens <= found.num_tokens

    streamed = ask_streamed(answers.server, body_of(answers.server, case))
    assert answer_of(streamed) == found


@of_all_cases
def test_a_chat_goes_on_after_any_answer(answers: Answers, case: Case) -> None:
    """The server takes back what it gave: the message as it is, and results of its calls."""
    server = answers.server
    message = answers.response(case)["choices"][0]["message"]
    marker = server.say(server.family.write("Done.", []))
    calls = message.get("tool_calls") or ()
    more = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"It is done: {marker}"}
        for call in calls
    ] or [{"role": "user", "content": marker}]
    body = body_of(server, case)
    switches = {"tools": body["tools"]} if "tools" in body else {}
    if "chat_template_kwargs" in body:  # it says what it says without a thought
        switches["chat_template_kwargs"] = server.family.not_thinking or {}
    messages = [*body["messages"], message, *more]
    asked = {"model": body["model"], "messages": messages, "max_tokens": 400, **switches}

    found = answer_of(ask(server, asked))

    assert (found.content, found.calls, found.finish_reason) == ("Done.", (), "stop")


@of_two_families
def test_jobs_and_batches_give_the_same_answers(answers: Answers) -> None:
    """All cases at once."""
    cases = answers.answered()
    expected = [answer_of(answers.response(case)) for case in cases]
    bodies = [body_of(answers.server, case) for case in cases]

    assert [answer_of(found) for found in run_jobs(answers.server, bodies)] == expected
    assert [answer_of(found) for found in run_batch(answers.server, bodies)] == expected


@of_two_families
def test_responses_have_the_items_of_chats(answers: Answers) -> None:
    """Whole and streamed, of all cases whose parameters a response has."""
    known = {"tools", "tool_choice", "response_format", "reasoning_effort", "chat_template_kwargs"}
    cases = [case for case in answers.answered() if set(case.body) <= known]
    assert cases
    for case in cases:
        expected = answer_of(answers.response(case))
        body = body_of(answers.server, case)

        assert answer_of_items(respond(answers.server, body)) == expected, case.title
        assert answer_of_items(respond_streamed(answers.server, body)) == expected, case.title


def test_the_settings_of_the_model_hold_unless_a_caller_has_others(answers: Answers) -> None:
    """The model says its sampling parameters."""
    server, family = answers.server, answers.server.family
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    own = {name: value for name, value in family.generation.items() if name in names}

    def settings_of(**given: Any) -> dict[str, Any]:
        case = Case("settings", family.write("PARAMS", []), body=given)
        content = answer_of(ask(server, body_of(server, case))).content
        # What is as usual is not sent to the worker.
        told: dict[str, Any] = json.loads(content or "")
        return {"temperature": 1.0, "top_p": 1.0} | told

    usual = {"temperature": 1.0, "top_p": 1.0} | own
    assert settings_of().items() >= usual.items()
    given = {"temperature": 0.25, "top_p": 0.5, "top_k": 7}
    assert settings_of(**given).items() >= given.items()
    card = httpx.get(f"{server.url}/v1/models/{family.name}").json()
    shown = card.get("generation") or {}
    assert shown.items() >= own.items()


@of_two_families
def test_a_killed_worker_changes_no_answer(answers: Answers) -> None:
    """All cases at once on two workers, of which one dies at a random token of one case."""
    server, cases = answers.server, answers.answered()
    server.have(2)
    chance = random.Random(server.family.name)
    killing = chance.choice(
        [case for case in cases if answer_of(answers.response(case)).num_tokens > 4]
    )
    number = chance.randint(1, answer_of(answers.response(killing)).num_tokens - 1)
    while True:
        kill = f"kill:{number}:killed"
        bodies = [body_of(server, case, kill if case is killing else "") for case in cases]
        with ThreadPoolExecutor(len(bodies)) as pool:
            found = list(pool.map(partial(ask_streamed, server), bodies))
        if (server.folder / SAYS / "killed").exists():
            break
        assert number, "no step killed the worker"
        number //= 2  # the tokens from the other on were forced by a grammar, which takes no step

    assert server.num_alive == 1
    for case, response in zip(cases, found, strict=True):
        assert answer_of(response) == answer_of(answers.response(case)), case.title
