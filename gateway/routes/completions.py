"""POST /v1/completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from contract.jobs import Endpoint
from gateway.auth import Inference
from gateway.calls import answer_call
from gateway.routing import Route

router = APIRouter(route_class=Route)


@router.post("/v1/completions")
async def create_completion(request: Request, caller: Inference) -> Response:
    """Goes on from a prompt, whole or as a stream."""
    return await answer_call(request, Endpoint.COMPLETIONS, caller)
