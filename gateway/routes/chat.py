"""POST /v1/chat/completions and POST /v1/completions."""

from fastapi import APIRouter
from starlette.responses import Response

from contract.jobs import Endpoint
from gateway.follow.answer_models import ChatCompletion, TextCompletion
from gateway.follow.job_objects import AcceptedJob
from gateway.http.handlers import answers
from gateway.prepare.schemas import ChatBody, CompletionBody
from gateway.routes.requests import CallRoute
from gateway.routes.sync_calls import EVENTS, AskedOptions, answer_call

router = APIRouter(
    route_class=CallRoute,
    tags=["calls"],
    responses={
        200: EVENTS,
        202: {"model": AcceptedJob, "description": "Accepted as a job"},
        **answers(401, 403, 404, 409, 415, 429, 504),
    },
)


@router.post("/v1/chat/completions", response_model=ChatCompletion)
async def create_chat_completion(options: AskedOptions, body: ChatBody) -> Response:
    """Answers a conversation, whole or as a stream."""
    return await answer_call(options, Endpoint.CHAT, body)


@router.post("/v1/completions", response_model=TextCompletion)
async def create_completion(options: AskedOptions, body: CompletionBody) -> Response:
    """Continues a prompt, whole or as a stream."""
    return await answer_call(options, Endpoint.COMPLETIONS, body)
