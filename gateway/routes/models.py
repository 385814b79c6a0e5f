"""GET /v1/models, /v1/models/{id}."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Path
from pydantic import BaseModel, Field

from contract.flows import Cascade, Definition, Ensemble, Pipeline, Route
from contract.jobs import ResumeKind
from contract.model_cards import ModelCard, PoolingCard
from contract.starts import ModelFailure
from gateway.follow.answer_models import EndpointPath
from gateway.http.errors import no_such_model
from gateway.http.handlers import answers
from gateway.prepare.admission import AnyCaller
from gateway.routes.requests import GuardedRoute
from gateway.state import ThisGateway

router = APIRouter(route_class=GuardedRoute, tags=["models"], responses=answers(401, 403, 429))


class ModelCapabilities(BaseModel):
    """The capabilities of the engine of the model's workers; other parameters are
    rejected by name."""

    prompt_logprobs: bool
    structured_output: bool
    tools: bool
    lora: bool
    images: bool = Field(description="in chats, as data URLs or files")
    resume: ResumeKind


class ModelGeneration(BaseModel):
    """What holds where a caller says nothing, by the model's generation_config.json; null: as in
    OpenAI's API."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    suppress_tokens: list[int] = Field(description="tokens that are never given")


class ModelPooling(BaseModel):
    """What a prefill-only model computes from a text, or from a pair of texts."""

    kind: Literal["embedding", "classifier", "reranker"]
    num_outputs: int
    dimensions: list[int] = Field(description="to which embeddings can be shortened")
    input_types: list[str] = Field(description="names of the model's instructions")
    labels: list[str]


FlowKind = Literal["route", "cascade", "ensemble", "pipeline"]
_KINDS: Mapping[type[Definition], FlowKind] = {
    Route: "route",
    Cascade: "cascade",
    Ensemble: "ensemble",
    Pipeline: "pipeline",
}


class ModelFailed(BaseModel):
    """Why none of the model's workers stays up, and when the next try is; null while it runs."""

    reason: str
    since: float
    retry_in_s: float | None


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "batchway"
    max_model_len: int
    endpoints: list[EndpointPath]
    capabilities: ModelCapabilities
    generation: ModelGeneration
    reasoning_parser: str | None = Field(description="how its reasoning is told from its answer")
    tool_call_parser: str | None = Field(description="how its calls of tools are read")
    pooling: ModelPooling | None
    flow: FlowKind | None = Field(description="of a model that consists of others")
    failed: ModelFailed | None = Field(description="of a model that cannot stay up")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/v1/models")
async def list_models(_: AnyCaller, gateway: ThisGateway) -> ModelList:
    """All published models, declared ones, and those that have failed before they could be
    published."""
    known = gateway.broker.known
    cards, failures = await known.models(), await known.failures()
    served = [_shown(card, failures.get(name)) for name, card in cards.items()]
    others = [name for name in dict.fromkeys([*known.declared, *failures]) if name not in cards]
    return ModelList(data=served + [_unpublished(name, failures.get(name)) for name in others])


@router.get("/v1/models/{model_id:path}", responses=answers(404))
async def get_model(
    _: AnyCaller,
    gateway: ThisGateway,
    model_id: Annotated[str, Path(json_schema_extra={"minLength": 1, "maxLength": 256})],
) -> Model:
    """One model."""
    known = gateway.broker.known
    model_id = await known.named(model_id)
    cards, failure = await known.models(), (await known.failures()).get(model_id)
    if model_id in cards:
        return _shown(cards[model_id], failure)
    if failure is None and model_id not in known.declared:
        raise no_such_model(model_id, {*cards, *known.declared})
    return _unpublished(model_id, failure)


def _unpublished(name: str, failure: ModelFailure | None) -> Model:
    """The object of a model that no worker has published."""
    card = ModelCard(
        name=name,
        context_length=0,
        vocab_size=0,
        eos_token_ids=(),
        tokenizer_sha256="",
        created_s=0 if failure is None else int(failure.since_s),
    )
    return _shown(card, failure).model_copy(update={"endpoints": []})


def _shown(card: ModelCard, failure: ModelFailure | None) -> Model:
    failed = None
    if failure is not None:
        retry_in_s = failure.retry_in_s or None
        failed = ModelFailed(reason=failure.reason, since=failure.since_s, retry_in_s=retry_in_s)
    return Model(
        id=card.name,
        created=card.created_s,
        max_model_len=card.context_length,
        endpoints=[endpoint.value for endpoint in card.endpoints],
        capabilities=ModelCapabilities(
            **{
                **msgspec.structs.asdict(card.capabilities),
                "images": card.capabilities.images is not None,
            }
        ),
        generation=ModelGeneration(**msgspec.structs.asdict(card.generation)),
        reasoning_parser=card.reasoning_parser or None,
        tool_call_parser=card.tool_call_parser or None,
        pooling=None if (can := card.pooling) is None else _pooling(can),
        flow=None if card.flow is None else _KINDS[type(card.flow.definition)],
        failed=failed,
    )


def _pooling(can: PoolingCard) -> ModelPooling:
    return ModelPooling(
        kind=can.kind,
        num_outputs=can.num_outputs,
        dimensions=list(can.dimensions),
        input_types=sorted(can.prompts),
        labels=list(can.labels),
    )
