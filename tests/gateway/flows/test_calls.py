"""Ids of a flow's calls, and the draws of its routes."""

import msgspec
import pytest

from contract.events import MemberRun
from contract.flows import Ensemble, Flow, FlowCall
from contract.jobs import Endpoint, SamplingParams
from contract.keys import new_job_id
from gateway.http.errors import ApiError
from gateway.prepare.flow_calls import split_point
from gateway.runners.flows.calls import CallOutcome, ModelCall, parse_body
from gateway.runners.flows.kinds import _scoring
from tests.contract.some_calls import make_job


def scoring(prompts: list[str], n: int) -> tuple[str, list[ModelCall]]:
    """The parent's id, and the calls of the scorer for two members with these choices."""
    definition = Ensemble(members=("a", "b"), combine="best-by-score", scorer="rank")
    flow = Flow(definition=definition, endpoints=(Endpoint.COMPLETIONS,))
    body = msgspec.json.encode({"model": "m", "prompt": prompts})
    call = FlowCall(flow=flow, body=body, retention_s=60.0)
    parent = msgspec.structs.replace(make_job(), flow=call)
    member = msgspec.structs.replace(
        make_job(),
        prompt_ids=(),
        prompt_list=((1,),) * len(prompts),
        params=SamplingParams(max_tokens=1, seed=1, n=n),
    )
    outcome = CallOutcome(MemberRun("a", member.id), member)
    calls = [each for index in range(2) for each in _scoring(parent, index, "rank", outcome)]
    return parent.id, calls


def test_each_choice_of_each_member_is_scored_by_a_call_of_its_own() -> None:
    """Beside its own prompt; also with the most choices that a call may have, 128."""
    parent_id, calls = scoring(["x"] * 16, 8)
    assert len({call.job_id(parent_id) for call in calls}) == 2 * 128
    _, calls = scoring(["x", "y"], 2)
    assert [call.body["text_1"] for call in calls] == ["x", "x", "y", "y"] * 2


def test_a_fault_in_a_step_s_body_names_the_field() -> None:
    message = {"role": "user", "content": "a"}
    deep: dict[str, object] = {}
    for _ in range(300):
        deep = {"a": deep}
    for more, fault in (
        ({"frobnicate": 1}, "frobnicate: unknown parameter"),
        ({"metadata": deep}, "Invalid JSON: recursion limit exceeded"),
        ({"messages": [message, {"role": "user"}]}, "messages.1.content: must be given"),
    ):
        with pytest.raises(ApiError) as caught:
            parse_body(Endpoint.CHAT, {"model": "m", "messages": [message], **more})
        assert caught.value.message.startswith(fault)


def test_a_route_to_a_route_draws_anew() -> None:
    """Of jobs that one route sends to the lower half, the next sends half there."""
    ids = [new_job_id() for _ in range(4000)]
    low = [each for each in ids if split_point(each, "outer") < 0.5]
    lower = [each for each in low if split_point(each, "inner") < 0.5]
    assert 0.45 < len(low) / len(ids) < 0.55
    assert 0.45 < len(lower) / len(low) < 0.55
