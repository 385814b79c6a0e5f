"""What flows may ask of their members, by the members' cards."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.flows import Flow
from contract.jobs import Endpoint
from contract.model_cards import ENDPOINTS_OF_KIND, PoolingCard
from gateway.runners.flows.definitions import FlowError, check_flows, load_flows
from tests.gateway.flows.model_files import CARDS, card, write

GENERATIVE = (Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES)


def checked(folder: Path, **flows: Any) -> dict[str, Flow]:
    path = write(folder, **flows)
    return check_flows(load_flows(path), CARDS, path)


def route(*models: str, **fields: Any) -> dict[str, Any]:
    return {"route": {"otherwise": [{"model": model} for model in models], **fields}}


def cascade(*models: str, **fields: Any) -> dict[str, Any]:
    *first, last = models
    sure = [{"model": model, "threshold": 0.5} for model in first]
    return {"cascade": {"members": [*sure, {"model": last}], **fields}}


def ensemble(combine: str, *models: str, **fields: Any) -> dict[str, Any]:
    return {"ensemble": {"members": list(models), "combine": combine, **fields}}


def pipeline(*steps: tuple[str, str]) -> dict[str, Any]:
    return {
        "pipeline": {
            "steps": [
                {"name": f"s{i}", "model": model, "endpoint": endpoint, "body": {}}
                for i, (model, endpoint) in enumerate(steps)
            ]
        }
    }


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
        (pipeline(("embed", "/v1/embeddings"), ("rank", "/v1/rerank")), (Endpoint.RERANK,)),
    ],
)
def test_a_flow_answers_what_its_members_can(
    tmp_path: Path, flow: dict[str, Any], endpoints: tuple[Endpoint, ...]
) -> None:
    """Its endpoints come from their cards."""
    assert set(checked(tmp_path, a=flow)["a"].endpoints) == set(endpoints)


def test_a_flow_may_be_a_member_of_an_earlier_one(tmp_path: Path) -> None:
    """Endpoints are found from the members up."""
    flows = checked(tmp_path, front=route("sure", "small"), sure=cascade("small", "large"))
    assert flows["front"].endpoints == GENERATIVE


def test_every_kind_of_model_can_be_routed_to(tmp_path: Path) -> None:
    """A route over one model has that model's endpoints, but for responses."""
    for name, one in CARDS.items():
        found = checked(tmp_path, a=route(name))["a"].endpoints
        assert set(found) == set(one.endpoints)
    assert {c.pooling.kind for c in CARDS.values() if c.pooling} == set(ENDPOINTS_OF_KIND)


@pytest.mark.parametrize(
    ("flow", "fault"),
    [
        (route("small", "larg"), "route.otherwise[1].model: no model 'larg' is served"),
        (route("small", "embed"), "route: the targets share no endpoint: small answers"),
        (
            route(
                "small",
                classifier="small",
                rules=[{"when": {"labels": ["ask"]}, "to": [{"model": "large"}]}],
            ),
            "route.classifier: 'small' does not classify",
        ),
        (
            route(
                "small",
                classifier="intent",
                rules=[{"when": {"labels": ["sing"]}, "to": [{"model": "large"}]}],
            ),
            "route.rules[0].when.labels: 'intent' has no label 'sing'; its labels are ask, chat",
        ),
        (cascade("embed", "embed"), "cascade: a cascade needs members that all generate text"),
        (
            cascade("small", "large", confidence={"by": "scorer", "scorer": "large"}),
            "cascade.confidence.scorer: 'large' does not answer /v1/score",
        ),
        (
            cascade("steps", "large"),
            "cascade.members[0].model: 'steps' is a pipeline, whose answers have no log prob",
        ),
        (ensemble("vote", "embed", "embed"), "ensemble: vote needs members that share one of"),
        (ensemble("mean", "small", "large"), "ensemble: mean needs members that share one of"),
        (
            ensemble("best-by-score", "small", "large", scorer="intent"),
            "ensemble.scorer: 'intent' does not answer /v1/score",
        ),
        (
            ensemble("mean", "embed", "embed-wide"),
            "ensemble: the outputs of its models must be the same: embed (embedding, 64 "
            "outputs); embed-wide (embedding, 128 outputs)",
        ),
        (
            ensemble("mean", "rank", "embed"),
            "ensemble: the outputs of its models must be the same: rank (reranker, 1 "
            "outputs); embed (embedding, 64 outputs)",
        ),
        (
            route(
                "intent",
                classifier="intent",
                rules=[{"when": {"labels": ["ask"]}, "to": [{"model": "mood"}]}],
            ),
            "route: the outputs of its models must be the same: mood (classifier, good, "
            "bad); intent (classifier, ask, chat)",
        ),
        (
            pipeline(("embed", "/v1/rerank"), ("rank", "/v1/embeddings")),
            "pipeline.steps[1].endpoint: 'rank' does not answer /v1/embeddings; it answers",
        ),
    ],
)
def test_an_impossible_flow_is_refused(tmp_path: Path, flow: dict[str, Any], fault: str) -> None:
    """By its file, its place, and what the member can do instead."""
    steps = pipeline(("small", "/v1/completions"))
    with pytest.raises(FlowError) as caught:
        checked(tmp_path, a=flow, steps=steps)
    assert str(caught.value).startswith(f"{tmp_path / 'models.yaml'}: models[0].{fault}")


def test_a_pipeline_may_be_a_cascades_last_member(tmp_path: Path) -> None:
    """Nothing depends on its log probabilities."""
    steps = pipeline(("small", "/v1/completions"))
    found = checked(tmp_path, a=cascade("small", "steps"), steps=steps)
    assert found["a"].endpoints == (Endpoint.COMPLETIONS,)


def test_a_flow_takes_no_served_models_name(tmp_path: Path) -> None:
    """Callers could not tell which of both they call; its own published card is no model."""
    path = write(tmp_path, small=route("large"))
    with pytest.raises(FlowError, match=r"models\[0\].name: 'small' is the name of a served"):
        check_flows(load_flows(path), CARDS)

    (flow,) = check_flows(load_flows(path), {"large": CARDS["large"]}).values()
    published = msgspec.structs.replace(card("small"), flow=flow)
    cards = {"large": CARDS["large"], "small": published}
    assert check_flows(load_flows(path), cards) == {"small": flow}


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
