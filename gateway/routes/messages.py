"""Anthropic's POST /v1/messages and POST /v1/messages/count_tokens: their jobs are chats."""

from fastapi import APIRouter
from starlette.responses import Response

from contract.jobs import Endpoint
from gateway.follow.answer_models import MessageObject, MessageTokens
from gateway.follow.job_objects import AcceptedJob
from gateway.http.handlers import message_answers
from gateway.prepare.admission import Inference
from gateway.prepare.messages import MessagesBody, PromptBody, count_tokens
from gateway.routes.calls import EVENTS, AskedCall, answer_call
from gateway.routes.requests import GuardedRoute
from gateway.state import ThisGateway

router = APIRouter(
    route_class=GuardedRoute, tags=["messages"], responses=message_answers(401, 403, 404, 415, 429)
)


@router.post(
    "/v1/messages",
    response_model=MessageObject,
    responses={
        200: EVENTS,
        202: {"model": AcceptedJob, "description": "Accepted as a job"},
        **message_answers(409, 504),
    },
)
async def create_message(call: AskedCall, caller: Inference, body: MessagesBody) -> Response:
    """Answers a conversation in Anthropic's form, whole or as a stream."""
    return await answer_call(call, caller, Endpoint.CHAT, body)


@router.post("/v1/messages/count_tokens")
async def count_message_tokens(
    caller: Inference, gateway: ThisGateway, body: PromptBody
) -> MessageTokens:
    """The tokens that the model would be given, without a call of it."""
    settings = gateway.settings
    job = caller.job(Endpoint.CHAT, body)
    submission = caller.call_submission(settings, may_become_job=False)
    return MessageTokens(input_tokens=await count_tokens(gateway, body, job, submission))
