"""models.yaml: what is read, what a flow may ask of its members, and what is refused by file,
place and fault."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.flows import MAX_CALLS, Cascade, Confidence, Ensemble, Flow, Member, Pipeline
from contract.jobs import Endpoint
from contract.model_cards import ENDPOINTS_OF_KIND, PoolingCard
from gateway.runners.flows.definitions import FlowError, check_flows, flow_card, load_flows
from tests.gateway.flows.model_files import (
    CARDS,
    COMPLETIONS,
    card,
    cascade,
    ensemble,
    pipeline,
    route,
    rule,
    step,
    write,
)

GENERATIVE = (Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES)
STEPS = pipeline(step("one", "small", COMPLETIONS))
SAME_OUTPUTS = "the outputs of its models must be the same: "


def checked(path: Path) -> dict[str, Flow]:
    return check_flows(load_flows(path), CARDS, path)


def fault_of(path: Path) -> str:
    with pytest.raises(FlowError) as caught:
        checked(path)
    found = str(caught.value)
    assert found.startswith(f"{path}: ") or "No such file" in found
    return found.removeprefix(f"{path}: ")


def assert_fault(path: Path, expected: str) -> None:
    """`…` at its end stands for any words."""
    found = fault_of(path)
    assert found.startswith(expected[:-1]) if expected.endswith("…") else found == expected, found


def test_a_file_gives_its_flows_in_order(tmp_path: Path) -> None:
    """Each as the definition that it holds."""
    found = load_flows(write(tmp_path, first=route("small"), second=cascade("small", "large")))
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


_FLOW = "{name: a, route: {otherwise: [{model: small}]}}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "the file: Expected `object`, got `null`…"),
        ("models: [", "line 1: not YAML: …"),
        ("models: []\nmodels: []", "line 2: not YAML: 'models' is there twice…"),
        ("models: [{name: a b}]", "models[0].name: Expected `str` matching regex…"),
        ("models: [{name: a, rout: {}}]", "models[0]: Object contains unknown field `rout`…"),
        ("models: [{name: a}]", "models[0]: needs exactly one of route, cascade, ensemble and…"),
        ("models: [{name: .inf, route: 1}]", "models[0].name: Expected `str`, got `null`…"),
        ("models: [*a]", "line 1: anchors and aliases…"),
        ("models: {~: 1}", "holds what JSON cannot: …"),
        (f"models: [{_FLOW}, {_FLOW}]", "models[1].name: 'a' is the name of an earlier flow"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    """The message tells the line of what is not YAML, else the place."""
    path = tmp_path / "models.yaml"
    path.write_text(text)
    assert_fault(path, fault)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    """As any other fault, by FlowError."""
    assert "No such file" in fault_of(tmp_path / "models.yaml")


def _asked(*asked: str) -> dict[str, Any]:
    """Flows of which each asks the next."""
    return {name: route("small", model) for name, model in zip("abcdefg", asked, strict=False)}


@pytest.mark.parametrize(
    ("flows", "fault"),
    [
        (
            {"a": route("small") | cascade("small", "large")},
            "models[0]: needs exactly one of route, cascade, ensemble and pipeline",
        ),
        (_asked("b", "c", "d", "b"), "models[1]: calls itself: b -> c -> d -> b"),
        # Ensembles of ensembles could otherwise flood the models by one call.
        (
            {f"f{n}": ensemble("vote", *[f"f{n - 1}" if n else "small"] * 16) for n in range(3)},
            f"models[2]: may make 4096 calls; at most {MAX_CALLS} may be",
        ),
        # An ensemble asks its scorer once for each member: 9 x (16 + 16) calls.
        (
            {
                "best": ensemble("best-by-score", *["small"] * 16, scorer="rank"),
                "many": ensemble("vote", *["best"] * 9),
            },
            f"models[1]: may make 288 calls; at most {MAX_CALLS} may be",
        ),
    ],
)
def test_flows_that_cannot_be_together_are_refused(
    tmp_path: Path, flows: dict[str, Any], fault: str
) -> None:
    """Kinds under one name, cycles, and calls that multiply."""
    assert_fault(write(tmp_path, **flows), fault)


@pytest.mark.parametrize(
    ("when", "fault"),
    [
        ({"pattern": "("}, "pattern: is no regular expression that can be used: unclosed group…"),
        ({"pattern": "(?=a)"}, "pattern: is no regular expression that can be used: look-around…"),
        ({"languages": ["xx"]}, "languages: unknown language 'xx'; known are af, …"),
        ({"labels": ["ask"]}, "labels: the route has no classifier…"),
        (
            {"min_prompt_tokens": 9, "max_prompt_tokens": 8},
            "max_prompt_tokens: is less than min_prompt_tokens…",
        ),
    ],
)
def test_a_rule_that_cannot_be_asked_is_refused(
    tmp_path: Path, when: dict[str, Any], fault: str
) -> None:
    """By its place in the rule."""
    flow = route("b", rules=[rule("a"), rule("a", **when)])
    assert_fault(write(tmp_path, a_flow=flow), f"models[0].route.rules[1].when.{fault}")


_ASK, _SING = [rule("large", labels=["ask"])], [rule("large", labels=["sing"])]


@pytest.mark.parametrize(
    ("flow", "fault"),
    [
        # A definition that contradicts itself.
        (route("a", classifier="intent"), "route.classifier: no rule has labels"),
        (
            {"cascade": {"members": [{"model": "a"}, {"model": "b"}]}},
            "cascade.members[0].threshold: is missing; `batchway cascade fit` finds one",
        ),
        (
            cascade("a", "b", threshold=2.0),
            "cascade.members[0].threshold: Expected `float` <= 1.0",
        ),
        (
            {"cascade": {"members": [{"model": model, "threshold": 1} for model in "ab"]}},
            "cascade.members[1].threshold: the last member's answer always stands",
        ),
        (
            cascade("small", "large", confidence={"by": "scorer"}),
            "cascade.confidence.scorer: goes with `by: scorer`, and only with it",
        ),
        (
            cascade("small", "large", confidence={"field": "sure"}),
            "cascade.confidence.field: goes with `by: field`, and only with it",
        ),
        (
            ensemble("best-by-score", "a", "b"),
            "ensemble.scorer: best-by-score needs one, and nothing else does",
        ),
        # Steps that cannot be run.
        (
            pipeline(step("input", "m", COMPLETIONS)),
            "pipeline.steps[0].name: 'input' is already the name of a value…",
        ),
        (
            pipeline(*[step("one", "m", COMPLETIONS)] * 2),
            "pipeline.steps[1].name: 'one' is already the name of a value…",
        ),
        (
            pipeline(step("one", "m", COMPLETIONS, stream=True)),
            "pipeline.steps[0].body.stream: cannot be set in a step…",
        ),
        (
            pipeline(step("one", "m", "/v1/x")),
            "pipeline.steps[0].endpoint: Invalid enum value '/v1/x'…",
        ),
        (
            pipeline(
                step("one", "m", COMPLETIONS, a=[1, "{{ two.text }}"]),
                step("two", "m", COMPLETIONS),
            ),
            "pipeline.steps[0].body.a[1]: 'two' is not known there; known are input…",
        ),
        (
            pipeline(step("one", "m", COMPLETIONS, a="{{ input")),
            "pipeline.steps[0].body.a: unexpected end of template…",
        ),
        # What the members' cards do not have.
        (route("small", "larg"), "route.otherwise[1].model: no model 'larg' is served…"),
        (route("small", "embed"), "route: the targets share no endpoint: small answers…"),
        (
            route("small", classifier="small", rules=_ASK),
            "route.classifier: 'small' does not classify…",
        ),
        (
            route("small", classifier="intent", rules=_SING),
            "route.rules[0].when.labels: 'intent' has no label 'sing'; its labels are ask, chat…",
        ),
        (cascade("embed", "embed"), "cascade: a cascade needs members that all generate text…"),
        (
            cascade("small", "large", confidence={"by": "scorer", "scorer": "large"}),
            "cascade.confidence.scorer: 'large' does not answer /v1/score…",
        ),
        (
            cascade("steps", "large"),
            "cascade.members[0].model: 'steps' is a pipeline, whose answers have no log prob…",
        ),
        (ensemble("vote", "embed", "embed"), "ensemble: vote needs members that share one of…"),
        (ensemble("mean", "small", "large"), "ensemble: mean needs members that share one of…"),
        (
            ensemble("best-by-score", "small", "large", scorer="intent"),
            "ensemble.scorer: 'intent' does not answer /v1/score…",
        ),
        (
            ensemble("mean", "embed", "embed-wide"),
            f"ensemble: {SAME_OUTPUTS}embed (embedding, 64 outputs); embed-wide (embedding, 128 "
            "outputs)…",
        ),
        (
            ensemble("mean", "rank", "embed"),
            f"ensemble: {SAME_OUTPUTS}rank (reranker, 1 outputs); embed (embedding, 64 outputs)…",
        ),
        (
            route("intent", classifier="intent", rules=[rule("mood", labels=["ask"])]),
            f"route: {SAME_OUTPUTS}mood (classifier, good, bad); intent (classifier, ask, chat)…",
        ),
        (
            pipeline(step("one", "embed", "/v1/rerank"), step("two", "rank", "/v1/embeddings")),
            "pipeline.steps[1].endpoint: 'rank' does not answer /v1/embeddings; it answers…",
        ),
    ],
)
def test_an_impossible_flow_is_refused(tmp_path: Path, flow: dict[str, Any], fault: str) -> None:
    """By its file, its place, and what the member can do instead."""
    assert_fault(write(tmp_path, a=flow, steps=STEPS), f"models[0].{fault}")


@pytest.mark.parametrize(
    ("flow", "endpoints"),
    [
        (route("small", "large"), GENERATIVE),
        (route("embed", "rank"), (Endpoint.RERANK, Endpoint.SCORE)),
        (cascade("small", "large"), GENERATIVE),
        (ensemble("vote", "small", "small", "large"), GENERATIVE),
        (ensemble("best-by-score", "small", "large", scorer="rank"), GENERATIVE),
        (ensemble("mean", "rank", "rank"), (Endpoint.SCORE, Endpoint.RERANK)),
        (ensemble("mean", "intent", "intent"), (Endpoint.CLASSIFY,)),
        (
            pipeline(step("one", "embed", "/v1/embeddings"), step("two", "rank", "/v1/rerank")),
            (Endpoint.RERANK,),
        ),
        # Nothing depends on the log probabilities of a last member.
        (cascade("small", "steps"), (Endpoint.COMPLETIONS,)),
        *((route(name), one.endpoints) for name, one in CARDS.items()),
    ],
)
def test_a_flow_answers_what_its_members_can(
    tmp_path: Path, flow: dict[str, Any], endpoints: tuple[Endpoint, ...]
) -> None:
    """Its endpoints come from their cards, of every kind; also those of a flow before them."""
    found = checked(write(tmp_path, front=route("a"), a=flow, steps=STEPS))
    assert set(found["a"].endpoints) == set(found["front"].endpoints) == set(endpoints)
    assert {c.pooling.kind for c in CARDS.values() if c.pooling} == set(ENDPOINTS_OF_KIND)


def test_a_flow_takes_no_served_models_name(tmp_path: Path) -> None:
    """Callers could not tell which of both they call; its own published card is no model."""
    path = write(tmp_path, small=route("large"))
    assert_fault(path, "models[0].name: 'small' is the name of a served…")

    (flow,) = check_flows(load_flows(path), {"large": CARDS["large"]}).values()
    published = msgspec.structs.replace(card("small"), flow=flow)
    cards = {"large": CARDS["large"], "small": published}
    assert check_flows(load_flows(path), cards) == {"small": flow}


def test_members_that_share_no_lane_are_refused() -> None:
    """Otherwise each call of the flow would fail."""
    vote = Ensemble(members=("small", "large"), combine="vote")
    flow = Flow(definition=vote, endpoints=(Endpoint.CHAT,))
    cards = {
        name: msgspec.structs.replace(CARDS[name], lanes=lanes)
        for name, lanes in (("small", ("interactive", "batch")), ("large", ("standard", "batch")))
    }
    assert flow_card("both", flow, cards).lanes == ("batch",)
    cards["large"] = msgspec.structs.replace(cards["large"], lanes=("standard",))
    with pytest.raises(FlowError, match="both: its members share no lane: small serves"):
        flow_card("both", flow, cards)


def test_the_example_can_be_loaded() -> None:
    """With models of the kinds that it names."""
    path = Path(__file__).parents[3] / "examples" / "models.yaml"
    labels = PoolingCard(kind="classifier", num_outputs=2, labels=("task", "chit-chat"))
    cards = CARDS | {"intent": card("intent", labels), "european": card("european")}
    flows = check_flows(load_flows(path), cards, path)
    assert {name: flow.endpoints for name, flow in flows.items()} == {
        "front": GENERATIVE,
        "sure": GENERATIVE,
        "best-of-three": GENERATIVE,
        "answer-from-documents": (Endpoint.CHAT, Endpoint.RESPONSES),
    }
