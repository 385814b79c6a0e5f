"""GET /v1/models, /v1/models/{id}."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from contract.jobs import ModelCard
from gateway.http.auth import AnyCaller
from gateway.http.errors import no_such_model
from gateway.http.routing import Route
from gateway.openai.sync_answers import gateway_of, json_response

router = APIRouter(route_class=Route)


@router.get("/v1/models")
async def list_models(request: Request, _: AnyCaller) -> Response:
    """Every model that a worker has published."""
    cards = await gateway_of(request).broker.known.models()
    return json_response({"object": "list", "data": [_shown(card) for card in cards.values()]})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, _: AnyCaller, model_id: str) -> Response:
    """One model."""
    cards = await gateway_of(request).broker.known.models()
    if model_id not in cards:
        raise no_such_model(model_id, cards)
    return json_response(_shown(cards[model_id]))


def _shown(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "batchway",
        "max_model_len": card.context_length,
    }
