"""POST /v1/uploads, and /v1/uploads/{id}/parts, /complete and /cancel: a file in parts, as OpenAI
has it.

A part is named by its content, so that one which is sent again is the same.
"""

import asyncio
import hashlib
import os
import re
import time
from typing import BinaryIO, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile

from contract.files import (
    UPLOAD_PURPOSE,
    UPLOAD_S,
    StoredFile,
    Upload,
    content_key,
    file_of_upload,
)
from contract.files import part_key as key_of
from contract.keys import new_id
from contract.payloads.store import ObjectStore
from gateway.files import Joined, delete_objects, recorded, store_of
from gateway.http.errors import MISSING, UNKNOWN, ApiError, bad_request, invalid_value, not_found
from gateway.http.handlers import answers
from gateway.prepare.admission import Caller, JobsWriter
from gateway.prepare.unsupported import OwnModel
from gateway.routes.files import MAX_FILENAME, ExpiresAfter, FileObject, file_object
from gateway.routes.requests import GuardedRoute, check_media_type, form_of, multipart
from gateway.state import AcceptingGateway, Gateway, ThisGateway

router = APIRouter(route_class=GuardedRoute, tags=["files"], responses=answers(401, 403, 429))

_MAX_PARTS = 1_000
_ID = re.compile(r"upload_([0-9]{1,4}-)?[0-9a-f]{32}")
_READ_BYTES = 2**20
_DATA = {"data": {"type": "string", "format": "binary"}}


class UploadBody(OwnModel):
    """POST /v1/uploads."""

    purpose: Literal["batch"] = Field(description="what the file is for")
    filename: str = Field(min_length=1, max_length=MAX_FILENAME, description="its name")
    bytes: int = Field(ge=0, description="of the whole file, which are counted from now on")
    mime_type: str = Field(max_length=255, description="ignored")
    expires_after: ExpiresAfter | None = Field(None, description="lifetime of the file")


class CompleteBody(OwnModel):
    """POST /v1/uploads/{id}/complete."""

    part_ids: list[str] = Field(max_length=_MAX_PARTS, description="in their order")
    md5: str | None = Field(
        None, pattern=r"^[0-9a-fA-F]{32}$", description="of the file: it is refused if it differs"
    )


class UploadObject(BaseModel):
    """OpenAI's upload object."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch"] = "batch"
    status: Literal["pending", "completed", "cancelled"]
    file: FileObject | None = None


class UploadPart(BaseModel):
    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


@router.post("/v1/uploads", responses=answers(415))
async def create_upload(
    caller: JobsWriter, gateway: AcceptingGateway, body: UploadBody
) -> UploadObject:
    """Begins a file that arrives in parts, within an hour."""
    store_of(gateway)
    most, of_tenant = gateway.settings.max_file_bytes, gateway.settings.max_tenant_file_bytes
    if body.bytes > most:
        raise ApiError(413, "body_too_large", f"a file may have {most} bytes", param="bytes")
    lifetime = body.expires_after
    lifetime_s = lifetime.seconds if lifetime else gateway.settings.file_lifetime_s
    name = os.path.basename(body.filename) or "upload"
    record = StoredFile(
        id=new_id("upload_", (await gateway.broker.shards.home(caller.tenant)).number),
        tenant=caller.tenant,
        num_bytes=body.bytes,
        purpose=f"{UPLOAD_PURPOSE}{int(lifetime_s)}",
        filename=name,
    )
    return _shown(await recorded(gateway, record, UPLOAD_S, of_tenant), "pending")


@router.post(
    "/v1/uploads/{upload_id}/parts",
    openapi_extra=multipart(["data"], _DATA, additionalProperties=False),
    responses=answers(404, 415),
)
async def add_part(
    request: Request, caller: JobsWriter, gateway: AcceptingGateway, upload_id: str
) -> UploadPart:
    """Stores a part of any length."""
    store, upload = store_of(gateway), await _known(gateway, caller, upload_id)
    check_media_type(request, "multipart/form-data")
    async with form_of(request, 1) as form:
        data = form.get("data")
        if data is None:
            raise bad_request(MISSING, "data: missing parameter", "data")
        if other := next((name for name in form if name != "data"), None):
            raise bad_request(UNKNOWN, f"unknown parameter: {other[:80]}", other[:80])
        if not isinstance(data, UploadFile):
            raise invalid_value("data", "data must be a file: give it a filename")
        part_id = await asyncio.to_thread(_stored, store, upload.record, data.file)
    return UploadPart(id=part_id, created_at=int(time.time()), upload_id=upload_id)


def _stored(store: ObjectStore, record: StoredFile, content: BinaryIO) -> str:
    """Stores a part unless it is there; returns its id. Raises ApiError, PayloadError."""
    hashed, num_bytes = hashlib.sha256(), 0
    while data := content.read(_READ_BYTES):
        hashed.update(data)
        num_bytes += len(data)
    content.seek(0)
    part_id = f"part_{hashed.hexdigest()[:32]}"
    known = store.sizes(record.id)
    if part_id in known:
        return part_id
    if sum(known.values()) + num_bytes > record.num_bytes:
        message = f"data: the parts have more than the {record.num_bytes} bytes of the upload"
        raise invalid_value("data", message)
    if len(known) >= _MAX_PARTS:
        raise invalid_value("data", f"data: an upload has at most {_MAX_PARTS} parts")
    store.write(key_of(record.id, part_id), content)
    return part_id


@router.post("/v1/uploads/{upload_id}/complete", responses=answers(404, 415))
async def complete_upload(
    caller: JobsWriter,
    gateway: AcceptingGateway,
    upload_id: str,
    body: CompleteBody,
) -> UploadObject:
    """Joins the parts to a file. It may be repeated."""
    store = store_of(gateway)
    if (file := await _file_of(gateway, caller, upload_id)) is not None:
        return _shown(file, "completed", file)
    upload = await _known(gateway, caller, upload_id)
    parts = _checked_parts(upload.record, body, await asyncio.to_thread(store.sizes, upload_id))
    file = upload.file()
    shard = await gateway.broker.shards.of(file.id)
    await shard.ask("file", shard.files.begin, file.id)
    joined = Joined(store, [(key_of(upload_id, name), num_bytes) for name, num_bytes in parts])
    await asyncio.to_thread(store.write, content_key(file.id), joined.buffered())
    if body.md5 is not None and body.md5.lower() != joined.md5:
        if await _file_of(gateway, caller, upload_id) is None:  # completed meanwhile otherwise
            await delete_objects(gateway, file.id)
        raise invalid_value("md5", "md5 is not that of the parts in this order")
    most = gateway.settings.max_tenant_file_bytes
    room = most and most + file.num_bytes  # the upload's own are counted until it is dropped
    file = await recorded(gateway, file, upload.file_lifetime_s, room)
    await _forget(gateway, caller, upload_id)
    return _shown(file, "completed", file)


@router.post("/v1/uploads/{upload_id}/cancel", responses=answers(404))
async def cancel_upload(caller: JobsWriter, gateway: ThisGateway, upload_id: str) -> UploadObject:
    """Deletes the parts of an upload."""
    upload = await _known(gateway, caller, upload_id)
    await _forget(gateway, caller, upload_id)
    return _shown(upload.record, "cancelled")


def _checked_parts(
    record: StoredFile, body: CompleteBody, known: dict[str, int]
) -> list[tuple[str, int]]:
    """Returns the parts with their bytes. Raises ApiError."""
    for number, part_id in enumerate(body.part_ids):
        if part_id not in known:
            message = f"part_ids.{number} is no part of this upload"
            raise invalid_value(f"part_ids.{number}", message)
    parts = [(part_id, known[part_id]) for part_id in body.part_ids]
    num_bytes = sum(size for _, size in parts)
    if num_bytes != record.num_bytes:
        message = f"part_ids: the parts have {num_bytes} bytes, the upload has {record.num_bytes}"
        raise invalid_value("part_ids", message)
    return parts


async def _forget(gateway: Gateway, caller: Caller, upload_id: str) -> None:
    shard = await gateway.broker.shards.of(upload_id)
    await shard.ask("file", shard.files.drop, upload_id, caller.tenant)
    await delete_objects(gateway, upload_id)


async def _known(gateway: Gateway, caller: Caller, upload_id: str) -> Upload:
    """The tenant's upload. Raises ApiError (404)."""
    found = None
    if _ID.fullmatch(upload_id):
        shard = await gateway.broker.shards.of(upload_id)
        found = await shard.ask("file", shard.files.find_upload, upload_id, caller.tenant)
    if found is None:
        raise not_found("this upload", "upload_not_found")
    return found


async def _file_of(gateway: Gateway, caller: Caller, upload_id: str) -> StoredFile | None:
    """The file of an upload that was completed."""
    if not _ID.fullmatch(upload_id):
        return None
    file_id = file_of_upload(upload_id)
    shard = await gateway.broker.shards.of(file_id)
    return await shard.ask("file", shard.files.find, file_id, caller.tenant)


def _shown(
    record: StoredFile,
    status: Literal["pending", "completed", "cancelled"],
    file: StoredFile | None = None,
) -> UploadObject:
    return UploadObject(
        id=record.id.replace("file-", "upload_", 1),
        bytes=record.num_bytes,
        created_at=record.created_ms // 1000,
        expires_at=record.created_ms // 1000 + int(UPLOAD_S),
        filename=record.filename,
        status=status,
        file=None if file is None else file_object(file),
    )
