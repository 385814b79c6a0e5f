"""GET /v1/objects/{job_id}/{name}: a stored result, by its signed URL.

Used only if the object store is a directory; S3 has presigned URLs of its own.
"""

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from contract.payloads.directory import DirectoryStore
from gateway.follow.answer_models import EndpointPath, FinishReason
from gateway.follow.job_objects import JobIdPath
from gateway.http.errors import not_found
from gateway.http.handlers import answers
from gateway.routes.requests import GuardedRoute, open_to_all
from gateway.state import ThisGateway

router = APIRouter(route_class=GuardedRoute, tags=["jobs"], responses=answers(404))


class StoredChoice(BaseModel):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    vector: str = Field(description="of a prompt, in base64: float32, little-endian; or empty")


class StoredResult(BaseModel):
    id: str
    object: Literal["job.result"]
    endpoint: EndpointPath
    model: str
    choices: list[StoredChoice]
    log: Any


@router.get("/v1/objects/{job_id}/{name}", response_model=StoredResult)
@open_to_all
async def get_object(
    request: Request, gateway: ThisGateway, job_id: JobIdPath, name: str
) -> Response:
    """The stored object; 404 if the URL is invalid or has expired, or the object is gone."""
    store = gateway.broker.payloads.store
    if isinstance(store, DirectoryStore):
        query = dict(request.query_params)
        ref = await asyncio.to_thread(store.opened, f"{job_id}/{name}", query)
        if ref is not None:
            data = await asyncio.to_thread(store.get, ref)
            return Response(data, media_type="application/json")
    raise not_found("this object", "object_not_found")
