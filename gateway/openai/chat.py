"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from contract.jobs import Endpoint
from gateway.http.auth import Inference
from gateway.http.routing import Route
from gateway.openai.sync_answers import answer_call

router = APIRouter(route_class=Route)


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request, caller: Inference) -> Response:
    """Answers a conversation, whole or as a stream."""
    return await answer_call(request, Endpoint.CHAT, caller)
