"""GET /v1/models, /v1/models/{id}."""

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Path
from pydantic import BaseModel

from contract.jobs import ModelCard, ResumeKind
from gateway.http.auth import AnyCaller
from gateway.http.errors import no_such_model
from gateway.http.handlers import answers
from gateway.jobs.streams import ThisGateway

router = APIRouter(tags=["models"], responses=answers(401, 403, 429))


class ModelCapabilities(BaseModel):
    """The capabilities of the engine of the model's workers; other parameters are
    rejected by name."""

    prompt_logprobs: bool
    structured_output: bool
    tools: bool
    lora: bool
    embeddings: bool
    resume: ResumeKind


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "batchway"
    max_model_len: int
    capabilities: ModelCapabilities


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/v1/models")
async def list_models(_: AnyCaller, gateway: ThisGateway) -> ModelList:
    """All published models."""
    cards = await gateway.broker.known.models()
    return ModelList(data=[_shown(card) for card in cards.values()])


@router.get("/v1/models/{model_id:path}", responses=answers(404))
async def get_model(
    _: AnyCaller,
    gateway: ThisGateway,
    model_id: Annotated[str, Path(json_schema_extra={"minLength": 1, "maxLength": 256})],
) -> Model:
    """One model."""
    cards = await gateway.broker.known.models()
    if model_id not in cards:
        raise no_such_model(model_id, cards)
    return _shown(cards[model_id])


def _shown(card: ModelCard) -> Model:
    return Model(
        id=card.name,
        created=card.created_s,
        max_model_len=card.context_length,
        capabilities=ModelCapabilities(**msgspec.structs.asdict(card.capabilities)),
    )
