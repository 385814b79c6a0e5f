"""POST and GET /v1/files; GET and DELETE /v1/files/{id}; GET /v1/files/{id}/content."""

import asyncio
import math
import os
import re
from typing import Annotated, Literal, cast
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.datastructures import FormData, UploadFile
from starlette.responses import RedirectResponse, Response, StreamingResponse

from contract.files import StoredFile, content_key, new_file_id
from contract.payloads.store import ObjectStore
from gateway.files import (
    ANSWER_BYTES,
    Span,
    check_quota,
    chunks,
    delete_objects,
    recorded,
    store_of,
)
from gateway.follow.answer_models import Page
from gateway.http.errors import MISSING, UNKNOWN, ApiError, bad_request, invalid_value, not_found
from gateway.http.handlers import answers
from gateway.prepare.admission import Caller, JobsReader, JobsWriter
from gateway.prepare.images import PURPOSES
from gateway.prepare.schemas import FILE_ID
from gateway.prepare.unsupported import OwnModel
from gateway.routes.requests import GuardedRoute, check_media_type, form_of, multipart
from gateway.settings import GatewaySettings
from gateway.state import AcceptingGateway, Gateway, ThisGateway

router = APIRouter(route_class=GuardedRoute, tags=["files"], responses=answers(401, 403, 429))

MIN_LIFETIME_S, MAX_LIFETIME_S = 3_600, 30 * 86_400  # OpenAI's; the store deletes older objects
_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
MAX_FILENAME = 255
_REDIRECT_S = 300.0  # in which a download from the store must begin
_UPLOADED = frozenset({"batch", *PURPOSES})
_LIFETIME = {"type": "integer", "minimum": MIN_LIFETIME_S, "maximum": MAX_LIFETIME_S}
_UPLOAD = multipart(
    ["file", "purpose"],
    {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch", "user_data", "vision"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": _LIFETIME,
    },
)

Purpose = Literal["batch", "batch_output", "user_data", "vision"]


class ExpiresAfter(OwnModel):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_LIFETIME_S, le=MAX_LIFETIME_S)]


class FileObject(BaseModel):
    """OpenAI's file object."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(Page):
    data: list[FileObject]


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def file_object(file: StoredFile) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.num_bytes,
        created_at=file.created_ms // 1000,
        expires_at=file.expires_ms // 1000,
        filename=file.filename,
        purpose=cast(Purpose, file.purpose if file.purpose in _UPLOADED else "batch_output"),
    )


@router.post("/v1/files", openapi_extra=_UPLOAD, responses=answers(415))
async def create_file(
    request: Request, caller: JobsWriter, gateway: AcceptingGateway
) -> FileObject:
    """Stores a file for batches, or an image, as it arrives."""
    store = store_of(gateway)
    check_media_type(request, "multipart/form-data")
    await check_quota(gateway, caller.tenant)
    async with form_of(request, len(_FIELDS)) as form:
        return await _stored(gateway, store, caller, form)


@router.get("/v1/files")
async def list_files(
    caller: JobsReader,
    gateway: ThisGateway,
    purpose: Purpose | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str, Query(description="the `last_id` of the page before")] = "",
) -> FileList:
    """A page of the tenant's files."""
    shard = await gateway.broker.shards.home(caller.tenant)
    found = await shard.ask(
        "file",
        shard.files.page,
        caller.tenant,
        purpose=purpose or "",
        after=after,
        is_oldest_first=order == "asc",
        max_files=limit + 1,
    )
    if found is None:
        message = "after is no file that is kept here: start at the first page"
        raise invalid_value("after", message)
    return FileList.of([file_object(file) for file in found], limit)


@router.get("/v1/files/{file_id}", responses=answers(404))
async def get_file(caller: JobsReader, gateway: ThisGateway, file_id: str) -> FileObject:
    """A file's description."""
    return file_object(await known_file(gateway, caller, file_id))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "The whole file"},
        206: {"content": {"application/octet-stream": {}}, "description": "The range asked for"},
        307: {"description": "More than the platform takes: `location` is the object store's"},
        **answers(404, 416),
    },
)
async def get_content(
    request: Request, caller: JobsReader, gateway: ThisGateway, file_id: str
) -> Response:
    """A file's content, or the bytes that `Range` asks for; or where the object store has it, if
    that is longer than an answer may be."""
    file = await known_file(gateway, caller, file_id)
    # Answers have no validator that If-Range could name, so it asks for the whole file.
    header = None if "if-range" in request.headers else ",".join(request.headers.getlist("range"))
    asked = Span.asked(header, file.num_bytes)
    span = asked or Span(0, file.num_bytes)
    headers = {
        "accept-ranges": "bytes",
        "content-length": str(span.num_bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
        "x-content-type-options": "nosniff",
    }
    if asked is not None:
        headers["content-range"] = f"bytes {span.start}-{span.end - 1}/{file.num_bytes}"
    store = store_of(gateway)
    await asyncio.to_thread(store.read, content_key(file_id), span.start, 1)  # or an error, in time
    if span.num_bytes > request.scope["state"].get(ANSWER_BYTES, math.inf):
        url = await asyncio.to_thread(
            store.download_url, content_key(file_id), file.filename, _REDIRECT_S
        )
        if url is not None:
            return RedirectResponse(url, headers={"cache-control": "no-store"})
    content = chunks(store, file_id, span)
    status = 200 if asked is None else 206
    return StreamingResponse(
        content, status, headers=headers, media_type="application/octet-stream"
    )


@router.delete("/v1/files/{file_id}", responses=answers(404))
async def delete_file(caller: JobsWriter, gateway: ThisGateway, file_id: str) -> DeletedFile:
    """Deletes a file. Batches that read it fail."""
    _check_id(file_id)
    shard = await gateway.broker.shards.of(file_id)
    if not await shard.ask("file", shard.files.drop, file_id, caller.tenant):
        raise no_such_file()
    await delete_objects(gateway, file_id)
    return DeletedFile(id=file_id)


async def known_file(gateway: Gateway, caller: Caller, file_id: str) -> StoredFile:
    """The tenant's file. Raises ApiError (404)."""
    _check_id(file_id)
    shard = await gateway.broker.shards.of(file_id)
    file = await shard.ask("file", shard.files.find, file_id, caller.tenant)
    if file is None:
        raise no_such_file()
    return file


def _check_id(file_id: str) -> None:
    """Raises ApiError (404)."""
    if not FILE_ID.fullmatch(file_id):
        raise no_such_file()


def no_such_file() -> ApiError:
    return not_found("this file", "file_not_found")


async def _stored(
    gateway: Gateway, store: ObjectStore, caller: Caller, form: FormData
) -> FileObject:
    upload, purpose, lifetime_s = _checked(form, gateway.settings)
    content = upload.file
    num_bytes = content.seek(0, os.SEEK_END)
    content.seek(0)
    most = gateway.settings.max_file_bytes
    if num_bytes > most:
        raise ApiError(413, "body_too_large", f"the file has more than {most} bytes", param="file")
    filename = os.path.basename(upload.filename or "upload")[:MAX_FILENAME]
    shard = await gateway.broker.shards.home(caller.tenant)
    file = StoredFile(
        id=new_file_id(shard.number),
        tenant=caller.tenant,
        num_bytes=num_bytes,
        purpose=purpose,
        filename=filename,
    )
    await shard.ask("file", shard.files.begin, file.id)
    await asyncio.to_thread(store.write, content_key(file.id), content)
    most = gateway.settings.max_tenant_file_bytes
    return file_object(await recorded(gateway, file, lifetime_s, most))


def _checked(form: FormData, settings: GatewaySettings) -> tuple[UploadFile, str, float]:
    """Returns the content, its purpose and the seconds that it is kept. Raises ApiError."""
    names = [name for name, _ in form.multi_items()]
    for name in names:
        if name not in _FIELDS:
            raise bad_request(UNKNOWN, f"unknown parameter: {name[:80]}", name[:80])
        if names.count(name) > 1:
            raise invalid_value(name, f"{name} appears twice")
    for name in ("file", "purpose"):
        if name not in names:
            raise bad_request(MISSING, f"{name}: missing parameter", name)
    upload, purpose = form["file"], form["purpose"]
    if not isinstance(upload, UploadFile):
        raise invalid_value("file", "file must be a file: give it a filename")
    if purpose not in _UPLOADED:
        raise invalid_value("purpose", f"purpose must be one of {', '.join(sorted(_UPLOADED))}")
    anchor = form.get("expires_after[anchor]")
    seconds = form.get("expires_after[seconds]")
    if (anchor, seconds) == (None, None):
        return upload, purpose, settings.file_lifetime_s
    if anchor != "created_at":
        raise invalid_value("expires_after.anchor", "expires_after.anchor must be 'created_at'")
    if not (isinstance(seconds, str) and re.fullmatch(r"[0-9]{1,8}", seconds)) or not (
        MIN_LIFETIME_S <= int(seconds) <= MAX_LIFETIME_S
    ):
        message = f"expires_after.seconds must be from {MIN_LIFETIME_S} to {MAX_LIFETIME_S}"
        raise invalid_value("expires_after.seconds", message)
    return upload, purpose, float(seconds)
