"""Files that arrive in parts, with OpenAI's client: joined, counted once, forgotten in time."""

import hashlib
import random
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis.asyncio
from openai import AsyncOpenAI

from contract.keys import Keys
from tests.clock import TEST_CLOCK
from tests.fleet import until

pytestmark = pytest.mark.anyio

CONTENT = random.Random(1).randbytes(2_500_000)
MIME = "application/jsonl"


async def begin(client: AsyncOpenAI, num_bytes: int = 10, **more: Any) -> str:
    upload = await client.uploads.create(
        purpose="batch", filename="a.jsonl", bytes=num_bytes, mime_type=MIME, **more
    )
    return upload.id


async def add(client: AsyncOpenAI, upload_id: str, data: bytes) -> str:
    return (await client.uploads.parts.create(upload_id, data=data)).id


@pytest.mark.parametrize("store_setting", ["directory", "s3"], indirect=True)
async def test_a_file_is_uploaded_in_parts(client: AsyncOpenAI, tmp_path: Path) -> None:
    """By the client's own way; the file is one as any other, and nothing of the parts is left."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(CONTENT)
    upload = await client.uploads.upload_file_chunked(
        file=path,
        mime_type=MIME,
        purpose="batch",
        part_size=400_000,
        md5=hashlib.md5(CONTENT, usedforsecurity=False).hexdigest(),
    )
    assert (upload.status, upload.bytes) == ("completed", len(CONTENT))
    file = upload.file
    assert file is not None
    assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", len(CONTENT), "batch")
    assert file.expires_at == file.created_at + 30 * 86_400
    assert await client.files.retrieve(file.id) == file
    assert (await client.files.content(file.id)).content == CONTENT
    assert [each.id async for each in await client.files.list()] == [file.id]
    with pytest.raises(openai.NotFoundError):
        await add(client, upload.id, b"more")


async def test_an_upload_is_repeated_without_harm(client: AsyncOpenAI) -> None:
    """A part that is sent twice is one, also if it occurs twice; the second completion shows the
    first."""
    upload_id = await begin(client, 8, expires_after={"anchor": "created_at", "seconds": 7_200})
    parts = [await add(client, upload_id, data) for data in (b"ab", b"ab", b"cdef", b"ab", b"")]
    assert len(set(parts)) == 3
    first = await client.uploads.complete(upload_id, part_ids=[parts[2], parts[4], *parts[:2]])
    again = await client.uploads.complete(upload_id, part_ids=[])
    assert first == again
    assert first.file is not None
    assert first.file.expires_at == first.file.created_at + 7_200
    assert (await client.files.content(first.file.id)).content == b"cdefabab"
    await client.files.delete(first.file.id)
    with pytest.raises(openai.NotFoundError):
        await client.uploads.complete(upload_id, part_ids=[])


async def test_what_does_not_make_the_file_is_refused(client: AsyncOpenAI) -> None:
    """More or fewer bytes than announced, unknown parts, another sum; the upload goes on."""
    upload_id = await begin(client, 4)
    part, other = await add(client, upload_id, b"abc"), await begin(client, 3)
    with pytest.raises(openai.BadRequestError) as refused:
        await add(client, upload_id, b"de")
    assert refused.value.param == "data"
    last, foreign = await add(client, upload_id, b"d"), await add(client, other, b"xyz")
    for part_ids, param in (
        ([part], "part_ids"),
        ([part, last, last], "part_ids"),
        ([part, "part_" + "0" * 32], "part_ids.1"),
        ([foreign, last], "part_ids.0"),
        (["../secret"], "part_ids.0"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.uploads.complete(upload_id, part_ids=part_ids)
        assert refused.value.param == param
    with pytest.raises(openai.BadRequestError) as refused:
        await client.uploads.complete(upload_id, part_ids=[part, last], md5="0" * 32)
    assert refused.value.param == "md5"
    done = await client.uploads.complete(upload_id, part_ids=[part, last])
    assert done.file is not None
    assert (await client.files.content(done.file.id)).content == b"abcd"


async def test_a_cancelled_upload_is_gone(client: AsyncOpenAI, tmp_path: Path) -> None:
    upload_id = await begin(client, 3_000_000)
    await add(client, upload_id, b"abc")
    with pytest.raises(openai.RateLimitError):
        await begin(client, 3_000_000)
    assert (await client.uploads.cancel(upload_id)).status == "cancelled"
    assert not (tmp_path / "objects" / upload_id).exists()
    await begin(client, 3_000_000)
    for ask in (client.uploads.cancel, client.files.retrieve, client.files.content):
        with pytest.raises(openai.NotFoundError):
            await ask(upload_id)


async def test_a_damaged_record_of_an_upload_is_told(
    client: AsyncOpenAI, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    upload_id = await begin(client)
    await redis_client.hset(keys.of("file", upload_id), "purpose", "upload:soon")
    with pytest.raises(openai.APIStatusError) as refused:
        await client.uploads.cancel(upload_id)
    assert refused.value.status_code == 410


async def test_an_upload_ends_after_an_hour(
    client: AsyncOpenAI, redis_client: redis.asyncio.Redis, keys: Keys, tmp_path: Path
) -> None:
    """A gateway deletes its parts, and the tenant has its bytes again."""
    upload_id = await begin(client, 3_000_000)
    await add(client, upload_id, b"abc")
    await redis_client.incrby(TEST_CLOCK, 3_601_000)

    async def is_gone() -> bool:
        held = await redis_client.hgetall(keys.of("file_bytes"))
        return not held and not (tmp_path / "objects" / upload_id).exists()

    await until(is_gone)
    with pytest.raises(openai.NotFoundError):
        await client.uploads.complete(upload_id, part_ids=[])


async def test_uploads_of_other_tenants_do_not_exist(
    tenants: tuple[AsyncOpenAI, AsyncOpenAI],
) -> None:
    """The same 404 as for an unknown id."""
    one, two = tenants
    upload_id = await begin(one)
    for asked in (upload_id, "upload_" + "0" * 32, "upload_x"):
        for ask in (
            two.uploads.cancel(asked),
            two.uploads.parts.create(asked, data=b"a"),
            two.uploads.complete(asked, part_ids=[]),
        ):
            with pytest.raises(openai.NotFoundError) as refused:
                await ask
            assert refused.value.code == "upload_not_found"


@pytest.mark.parametrize(
    ("path", "request_", "status", "param"),
    [
        ("", {"json": {"purpose": "batch", "filename": "a", "bytes": 3_000_001}}, 400, "mime_type"),
        ("", {"json": {"bytes": -1}}, 400, "purpose"),
        ("", {"json": {"purpose": "vision"}}, 400, "purpose"),
        ("", {"content": b"a"}, 415, None),
        ("/{id}/parts", {"json": {}}, 415, None),
        ("/{id}/parts", {"data": {"data": "text"}, "files": {"x": b""}}, 400, "x"),
        ("/{id}/parts", {"files": {"other": b"1"}}, 400, "data"),
        ("/{id}/parts", {"files": {"data": b"1" * 4_000_000}}, 413, None),
        ("/{id}/complete", {"json": {}}, 400, "part_ids"),
        ("/{id}/complete", {"json": {"part_ids": [], "md5": "a"}}, 400, "md5"),
        ("/{id}/complete", {"json": {"part_ids": [], "more": 1}}, 400, "more"),
    ],
)
async def test_a_wrong_request_names_what_is_wrong(
    client: AsyncOpenAI,
    base_url: str,
    path: str,
    request_: dict[str, Any],
    status: int,
    param: str | None,
) -> None:
    path = path.format(id=await begin(client))
    async with httpx.AsyncClient(base_url=base_url) as http:
        answer = await http.post(f"/v1/uploads{path}", **request_)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_a_file_may_be_too_large_in_parts_too(client: AsyncOpenAI) -> None:
    """By what is announced, before any part is sent."""
    with pytest.raises(openai.APIStatusError) as refused:
        await begin(client, 3_000_001)
    assert refused.value.status_code == 413
