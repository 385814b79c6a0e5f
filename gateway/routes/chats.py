"""Chats with `store: true`: GET /v1/chat/completions; GET, DELETE /v1/chat/completions/{id}; GET
…/messages."""

import contextlib
import re
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Path, Query
from pydantic_core import from_json
from starlette.responses import Response

from contract.function_types import JobView, Wanted
from contract.jobs import JobStatus
from contract.payloads.store import PayloadLost
from gateway.follow.answer_models import ChatList, DeletedChat, ItemList, StoredChat
from gateway.follow.members import cancel_whole, delete_whole
from gateway.follow.streams import ended_answer
from gateway.http import sse
from gateway.http.errors import RecordUnreadable, UnknownJob, invalid_value, not_found
from gateway.http.handlers import answers
from gateway.prepare.admission import Caller, JobsReader, JobsWriter
from gateway.routes.calls import check_may_change
from gateway.routes.jobs import METADATA_QUERY, metadata_beside
from gateway.routes.requests import GuardedRoute
from gateway.state import Gateway, ThisGateway

router = APIRouter(route_class=GuardedRoute, tags=["calls"], responses=answers(401, 403, 429))

_ID = re.compile(r"chatcmpl-(\d{1,4}-[0-9a-f]{32})")
_PAGE_BYTES = 2**22  # of answers and requests, after which a page ends
_METADATA = Depends(metadata_beside("after limit model order"))
ChatId = Annotated[str, Path(json_schema_extra={"pattern": f"^{_ID.pattern}$"})]
Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]


async def _read(gateway: Gateway, chat_id: str, caller: Caller, *, is_any: bool = False) -> JobView:
    """The job of a stored chat that has its answer, or of any. Raises ApiError (404)."""
    with contextlib.suppress(UnknownJob):
        view, _ = await gateway.broker.read(_job_id(chat_id), caller.tenant)
        if view.job.is_stored_chat and (is_any or view.status is JobStatus.SUCCEEDED):
            return view
    raise not_found("this chat completion", "completion_not_found")


def _job_id(chat_id: str) -> str:
    """Raises UnknownJob."""
    if (match := _ID.fullmatch(chat_id)) is None:
        raise UnknownJob
    return f"job-{match[1]}"


async def _shown(gateway: Gateway, view: JobView) -> dict[str, Any]:
    """The answer of the call, with what its request asked for."""
    request = from_json(await gateway.broker.payloads.response(view.job))
    del request["messages"]
    request |= {"input_user": request.pop("user", None), "metadata": dict(view.metadata)}
    return {**request, **await ended_answer(gateway, view)}


@router.get("/v1/chat/completions", response_model=ChatList, openapi_extra=METADATA_QUERY)
async def list_chats(
    caller: JobsReader,
    gateway: ThisGateway,
    metadata: Annotated[dict[str, str], _METADATA],
    model: str = "",
    order: Order = "asc",
    limit: Limit = 20,
    after: Annotated[str, Query(description="the `last_id` of the page before")] = "",
) -> Response:
    """A page of the stored chats that have their answers, by the time of their calls."""
    broker = gateway.broker
    await broker.sweep()
    wanted = Wanted(
        statuses=frozenset({JobStatus.SUCCEEDED}),
        model=await broker.known.named(model),
        metadata=metadata,
        is_chats=True,
        is_ascending=order == "asc",
    )
    try:
        start = _job_id(after) if after else ""
        page = await broker.list_jobs(caller.tenant, wanted, after=start, max_jobs=limit)
    except UnknownJob:
        raise invalid_value("after", "after is no stored chat: start at the first page") from None
    chats, num_bytes, end = list[msgspec.Raw](), 0, page.position
    ids = ["chatcmpl-" + view.job.id.removeprefix("job-") for view in page.views]
    for number, view in enumerate(page.views):
        if num_bytes > _PAGE_BYTES:
            del ids[number:]
            end = page.views[number - 1].job.id
            break
        with contextlib.suppress(UnknownJob, RecordUnreadable, PayloadLost):
            chats.append(msgspec.Raw(sse.encode_json(await _shown(gateway, view))))
            num_bytes += len(bytes(chats[-1]))
        stored = view.job.stored_response
        num_bytes += len(view.job.response) if stored is None else stored.num_bytes
    # If few chats match, the search may have ended after the last match.
    last = "chatcmpl-" + end.removeprefix("job-") if end else ids[-1] if ids else None
    head = {"object": "list", "first_id": ids[0] if ids else None, "last_id": last}
    return sse.json_response(head | {"data": chats, "has_more": bool(end)})


@router.get("/v1/chat/completions/{chat_id}", response_model=StoredChat, responses=answers(404))
async def get_chat(caller: JobsReader, gateway: ThisGateway, chat_id: ChatId) -> Response:
    """A stored chat with its answer."""
    return sse.json_response(await _shown(gateway, await _read(gateway, chat_id, caller)))


@router.delete("/v1/chat/completions/{chat_id}", responses=answers(404))
async def delete_chat(caller: JobsWriter, gateway: ThisGateway, chat_id: ChatId) -> DeletedChat:
    """Deletes a stored chat with its job, and ends it first if it runs."""
    view = await _read(gateway, chat_id, caller, is_any=True)
    await check_may_change(gateway.broker, caller, view.job.id)
    if not view.is_terminal:
        await cancel_whole(gateway.broker, view.job)
    await delete_whole(gateway.broker, view.job.id, caller.tenant)
    return DeletedChat(id=chat_id)


@router.get("/v1/chat/completions/{chat_id}/messages", responses=answers(404))
async def list_messages(
    caller: JobsReader,
    gateway: ThisGateway,
    chat_id: ChatId,
    order: Order = "asc",
    limit: Limit = 20,
    after: Annotated[str | None, Query(max_length=256, description="a message's id")] = None,
) -> ItemList:
    """The messages that the model was given."""
    view = await _read(gateway, chat_id, caller)
    given = from_json(await gateway.broker.payloads.response(view.job))["messages"]
    blank = {"content": None, "content_parts": None}
    messages = [blank | each | {"id": f"{chat_id}-{i}"} for i, each in enumerate(given)]
    for message in messages:
        if isinstance(parts := message["content"], list):
            texts = (part["text"] for part in parts if part["type"] == "text")
            message |= {"content": "\n".join(texts), "content_parts": parts}
    return ItemList.ordered(messages, order, after, limit)
