"""Models of each family with their own tokenizers, templates and formats, end to end: real gateway,
Redis and workers, of which only the weights are replaced by a text to say."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.real.callers import answer_of, ask, ask_streamed, body_of, run_batch, run_jobs
from tests.real.cases import Case, cases_of
from tests.real.families import FAMILIES
from tests.real.parts import needs_parts
from tests.real.server import Server, running_server

pytestmark = [pytest.mark.campaign, pytest.mark.e2e, needs_parts]

BY_NAME = {family.name: family for family in FAMILIES}
_AT_ONCE = 12


class Answers:
    """What one family's server answers to all cases, asked once."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.cases = {case.title: case for case in cases_of(server.family)}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            self.whole = dict(
                zip(self.cases, pool.map(self._ask, self.cases.values()), strict=True)
            )

    def _ask(self, case: Case) -> dict[str, Any] | openai.APIError:
        try:
            return ask(self.server, body_of(self.server, case))
        except openai.APIError as refused:
            return refused

    def response(self, case: Case) -> dict[str, Any]:
        found = self.whole[case.title]
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
    params = [
        pytest.param(family.name, case, id=f"{family.name}: {case.title}")
        for family in FAMILIES
        for case in cases_of(family)
    ]
    return pytest.mark.parametrize(("answers", "case"), params, indirect=["answers"])(test)


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
    switches = {k: v for k, v in body.items() if k in ("tools", "chat_template_kwargs")}
    messages = [*body["messages"], message, *more]
    asked = {"model": body["model"], "messages": messages, "max_tokens": 400, **switches}

    found = answer_of(ask(server, asked))

    assert (found.content, found.calls, found.finish_reason) == ("Done.", (), "stop")


def test_jobs_and_batches_give_the_same_answers(answers: Answers) -> None:
    """All cases at once."""
    cases = [case for case in answers.cases.values() if isinstance(answers.whole[case.title], dict)]
    expected = [answer_of(answers.response(case)) for case in cases]
    bodies = [body_of(answers.server, case) for case in cases]

    assert [answer_of(found) for found in run_jobs(answers.server, bodies)] == expected
    assert [answer_of(found) for found in run_batch(answers.server, bodies)] == expected
