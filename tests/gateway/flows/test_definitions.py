"""models.yaml: what is read, and what is refused by file, place and fault."""

from pathlib import Path
from typing import Any

import pytest

from contract.flows import MAX_CALLS, Cascade, Confidence, Member, Pipeline
from contract.jobs import Endpoint
from gateway.runners.flows.definitions import FlowError, load_flows
from tests.gateway.flows.model_files import write

ROUTE: dict[str, Any] = {"route": {"otherwise": [{"model": "small"}]}}
CASCADE: dict[str, Any] = {
    "cascade": {"members": [{"model": "small", "threshold": 0.5}, {"model": "large"}]}
}


def fault_of(path: Path) -> str:
    with pytest.raises(FlowError) as caught:
        load_flows(path)
    return str(caught.value).removeprefix(f"{path}: ")


def test_a_file_gives_its_flows_in_order(tmp_path: Path) -> None:
    """Each as the definition that it holds."""
    found = load_flows(write(tmp_path, first=ROUTE, second=CASCADE))
    assert list(found) == ["first", "second"]
    assert found["second"] == Cascade(
        members=(Member(model="small", threshold=0.5), Member(model="large")),
        confidence=Confidence(by="mean_logprob"),
    )


def test_a_body_is_of_json_values(tmp_path: Path) -> None:
    """YAML's dates become text, and its keys strings."""
    path = tmp_path / "models.yaml"
    path.write_text(
        "models:\n- name: a\n  pipeline:\n    steps:\n    - name: one\n      model: small\n"
        "      endpoint: /v1/completions\n      body: {day: 2026-01-02, logit_bias: {5: 1}}\n"
    )
    found = load_flows(path)["a"]
    assert isinstance(found, Pipeline)
    assert found.steps[0].endpoint is Endpoint.COMPLETIONS
    assert found.steps[0].body == {"day": "2026-01-02", "logit_bias": {"5": 1}}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "the file: Expected `object`, got `null`"),
        ("models: [", "line 1: not YAML: "),
        ("models: []\nmodels: []", "line 2: not YAML: 'models' is there twice"),
        ("models: [{name: a b}]", "models[0].name: Expected `str` matching regex"),
        ("models: [{name: a, rout: {}}]", "models[0]: Object contains unknown field `rout`"),
        ("models: [{name: a}]", "models[0]: needs exactly one of route, cascade, ensemble and"),
        ("models: [{name: .inf, route: 1}]", "models[0].name: Expected `str`, got `null`"),
        ("models: [*a]", "line 1: anchors and aliases"),
        ("models: {~: 1}", "holds what JSON cannot: "),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    """The message tells the line of what is not YAML, else the place."""
    path = tmp_path / "models.yaml"
    path.write_text(text)
    assert fault_of(path).startswith(fault)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    """As any other fault, by FlowError."""
    assert "No such file" in fault_of(tmp_path / "models.yaml")


def test_a_flow_is_of_one_kind(tmp_path: Path) -> None:
    """Two kinds under one name are refused."""
    fault = fault_of(write(tmp_path, a=ROUTE | CASCADE))
    assert fault == "models[0]: needs exactly one of route, cascade, ensemble and pipeline"


def test_a_name_is_of_one_flow(tmp_path: Path) -> None:
    """The second flow of a name is refused."""
    path = tmp_path / "models.yaml"
    flow = "{name: a, route: {otherwise: [{model: small}]}}"
    path.write_text(f"models: [{flow}, {flow}]")
    assert fault_of(path) == "models[1].name: 'a' is the name of an earlier flow"


def test_a_cycle_is_named_whole(tmp_path: Path) -> None:
    """From a flow back to itself, over all between."""

    def to(model: str) -> dict[str, Any]:
        return {"route": {"otherwise": [{"model": "small"}, {"model": model}]}}

    fault = fault_of(write(tmp_path, a=to("b"), b=to("c"), c=to("d"), d=to("b")))
    assert fault == "models[1]: calls itself: b -> c -> d -> b"


def test_a_flow_that_multiplies_calls_is_refused(tmp_path: Path) -> None:
    """Ensembles of ensembles could otherwise flood the models by one call."""
    flows: dict[str, Any] = {
        f"f{level}": {
            "ensemble": {"members": [f"f{level - 1}" if level else "small"] * 16, "combine": "vote"}
        }
        for level in range(3)
    }
    fault = fault_of(write(tmp_path, **flows))
    assert fault == f"models[2]: may make 4096 calls; at most {MAX_CALLS} may be"


def test_each_scored_member_is_a_call_more(tmp_path: Path) -> None:
    """An ensemble asks its scorer once for each member: 9 x (16 + 16) calls."""
    best = {"members": ["small"] * 16, "combine": "best-by-score", "scorer": "rank"}
    many = {"ensemble": {"members": ["best"] * 9, "combine": "vote"}}
    fault = fault_of(write(tmp_path, best={"ensemble": best}, many=many))
    assert fault == f"models[1]: may make 288 calls; at most {MAX_CALLS} may be"


@pytest.mark.parametrize(
    ("place", "when", "fault"),
    [
        ("pattern", {"pattern": "("}, "is no regular expression that can be used: unclosed group"),
        ("pattern", {"pattern": "(?=a)"}, "is no regular expression that can be used: look-around"),
        ("languages", {"languages": ["xx"]}, "unknown language 'xx'; known are af, "),
        ("labels", {"labels": ["ask"]}, "the route has no classifier"),
        (
            "max_prompt_tokens",
            {"min_prompt_tokens": 9, "max_prompt_tokens": 8},
            "is less than min_prompt_tokens",
        ),
    ],
)
def test_a_rule_that_cannot_be_asked_is_refused(
    tmp_path: Path, place: str, when: dict[str, Any], fault: str
) -> None:
    """By its place in the rule."""
    rules = [{"when": {}, "to": [{"model": "a"}]}, {"when": when, "to": [{"model": "a"}]}]
    route = {"route": {"rules": rules, "otherwise": [{"model": "b"}]}}
    found = fault_of(write(tmp_path, a_flow=route))
    assert found.startswith(f"models[0].route.rules[1].when.{place}: {fault}")


@pytest.mark.parametrize(
    ("kind", "change", "fault"),
    [
        (
            "route",
            {"classifier": "intent", "otherwise": [{"model": "a"}]},
            "classifier: no rule has labels",
        ),
        (
            "cascade",
            {"members": [{"model": "a"}, {"model": "b"}]},
            "members[0].threshold: is missing; `batchway cascade fit` finds one",
        ),
        (
            "cascade",
            {"members": [{"model": "a", "threshold": 2.0}, {"model": "b"}]},
            "members[0].threshold: Expected `float` <= 1.0",
        ),
        (
            "cascade",
            {"members": [{"model": "a", "threshold": 1}, {"model": "b", "threshold": 1}]},
            "members[1].threshold: the last member's answer always stands",
        ),
        (
            "cascade",
            {**CASCADE["cascade"], "confidence": {"by": "scorer"}},
            "confidence.scorer: goes with `by: scorer`, and only with it",
        ),
        (
            "cascade",
            {**CASCADE["cascade"], "confidence": {"field": "sure"}},
            "confidence.field: goes with `by: field`, and only with it",
        ),
        (
            "ensemble",
            {"members": ["a", "b"], "combine": "best-by-score"},
            "scorer: best-by-score needs one, and nothing else does",
        ),
    ],
)
def test_a_definition_that_contradicts_itself_is_refused(
    tmp_path: Path, kind: str, change: dict[str, Any], fault: str
) -> None:
    """By its place in the definition."""
    assert fault_of(write(tmp_path, a={kind: change})) == f"models[0].{kind}.{fault}"


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        ([{"name": "input"}], "steps[0].name: 'input' is already the name of a value"),
        ([{}, {}], "steps[1].name: 'one' is already the name of a value"),
        ([{"body": {"stream": True}}], "steps[0].body.stream: cannot be set in a step"),
        ([{"endpoint": "/v1/x"}], "steps[0].endpoint: Invalid enum value '/v1/x'"),
        (
            [{"body": {"a": [1, "{{ two.text }}"]}}, {"name": "two"}],
            "steps[0].body.a[1]: 'two' is not known there; known are input",
        ),
        ([{"body": {"a": "{{ input"}}], "steps[0].body.a: unexpected end of template"),
    ],
)
def test_a_step_that_cannot_be_run_is_refused(
    tmp_path: Path, steps: list[dict[str, Any]], fault: str
) -> None:
    """By its place in the pipeline."""
    whole = {"name": "one", "model": "m", "endpoint": "/v1/completions", "body": {}}
    path = write(tmp_path, a={"pipeline": {"steps": [whole | step for step in steps]}})
    assert fault_of(path).startswith(f"models[0].pipeline.{fault}")
