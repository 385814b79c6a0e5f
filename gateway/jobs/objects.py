"""GET /v1/objects/{job_id}/{name}: a kept result, for whoever holds its signed URL. Only where the
object store is a directory; S3 signs URLs of its own.
"""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from contract.payloads.directory import DirectoryStore
from gateway.http.errors import not_found
from gateway.http.routing import Route
from gateway.openai.sync_answers import gateway_of

router = APIRouter(route_class=Route)


@router.get("/v1/objects/{job_id}/{name}")
async def get_object(request: Request, job_id: str, name: str) -> Response:
    """The object as it was written; 404 for a URL that is not ours, that has expired, or whose
    object is gone."""
    store = gateway_of(request).broker.payloads.store
    if isinstance(store, DirectoryStore):
        query = dict(request.query_params)
        ref = await asyncio.to_thread(store.opened, f"{job_id}/{name}", query)
        if ref is not None:
            data = await asyncio.to_thread(store.get, ref)
            return Response(data, media_type="application/json")
    raise not_found("this object", "object_not_found")
