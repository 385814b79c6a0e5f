"""Files over HTTP, with OpenAI's client: stored, listed, read in ranges, deleted, forgotten."""

import random
import secrets
from typing import Any

import httpx
import openai
import pytest
import redis.asyncio
from openai import AsyncOpenAI

from contract.keys import Keys
from tests.batches.conftest import client_of
from tests.clock import TEST_CLOCK
from tests.fleet import until

pytestmark = pytest.mark.anyio

CONTENT = b'{"custom_id": "1"}\n' * 1000


async def store(client: AsyncOpenAI, content: bytes = CONTENT, name: str = "in.jsonl") -> str:
    return (await client.files.create(file=(name, content), purpose="batch")).id


@pytest.mark.parametrize("store_setting", ["directory", "s3"], indirect=True)
async def test_a_file_is_stored_read_and_deleted(client: AsyncOpenAI) -> None:
    """With its size, name and times; after the deletion it is unknown."""
    content = random.Random(1).randbytes(2_500_000)
    file = await client.files.create(file=("ünser file.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (
        len(content),
        "ünser file.jsonl",
        "batch",
    )
    assert file.expires_at == file.created_at + 30 * 86_400
    assert await client.files.retrieve(file.id) == file
    assert (await client.files.content(file.id)).content == content
    for start, end in ((0, 1), (1_000_000, 1_600_000), (2_499_999, 2_500_000)):
        headers = {"Range": f"bytes={start}-{end - 1}"}
        part = await client.files.content(file.id, extra_headers=headers)
        assert part.response.status_code == 206
        assert part.response.headers["content-range"] == f"bytes {start}-{end - 1}/2500000"
        assert part.content == content[start:end]
    deleted = await client.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(file.id)


async def test_ranges_are_those_of_http(client: AsyncOpenAI, base_url: str) -> None:
    """Of one range or of several that touch; a malformed one, or one of another version of the
    file, gets the whole file. test_ranges.py has all others."""
    file_id, num_bytes = await store(client), len(CONTENT)
    async with httpx.AsyncClient(base_url=base_url) as http:
        for headers, status, expected, content_range in (
            ({"range": "bytes=-7"}, 206, CONTENT[-7:], f"bytes 18993-18999/{num_bytes}"),
            ({"range": "Bytes=0-1, 2-5"}, 206, CONTENT[:6], f"bytes 0-5/{num_bytes}"),
            ({"range": "lines=1-2"}, 200, CONTENT, None),
            ({"range": "bytes=0-1", "if-range": '"a"'}, 200, CONTENT, None),
            ({"range": f"bytes={num_bytes}-"}, 416, None, f"bytes */{num_bytes}"),
        ):
            answer = await http.get(f"/v1/files/{file_id}/content", headers=headers)
            assert answer.status_code == status
            assert answer.headers.get("content-range") == content_range
            assert expected in (None, answer.content)


async def test_files_are_listed_page_by_page(client: AsyncOpenAI) -> None:
    """Youngest first unless asked otherwise, by purpose, each once."""
    stored = [await store(client, name=f"{number}.jsonl") for number in range(5)]
    assert [file.id async for file in await client.files.list(limit=2)] == stored[::-1]
    assert [file.id async for file in await client.files.list(order="asc", limit=3)] == stored
    page = await client.files.list(limit=2, purpose="batch")
    assert ([file.id for file in page.data], page.has_more) == (stored[:2:-1], True)
    assert (await client.files.list(purpose="batch_output")).data == []
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.list(after="file-" + "0" * 32)
    assert refused.value.param == "after"


async def test_files_of_other_tenants_do_not_exist(
    tenants: tuple[AsyncOpenAI, AsyncOpenAI],
) -> None:
    """The same 404 as for an unknown id; each tenant lists its own."""
    one, two = tenants
    file_id = await store(one)
    errors = []
    for asked in (file_id, "file-" + secrets.token_hex(16), "file-abc"):
        for ask in (two.files.retrieve, two.files.content, two.files.delete):
            with pytest.raises(openai.NotFoundError) as refused:
                await ask(asked)
            errors.append(refused.value.body)
    assert all(error == errors[0] for error in errors)
    assert (await two.files.list()).data == []
    assert [file.id for file in (await one.files.list()).data] == [file_id]


async def test_a_file_or_a_tenants_files_may_be_too_large(client: AsyncOpenAI) -> None:
    """413 for one over its limit, 429 for one over the tenant's; a deletion makes room."""
    with pytest.raises(openai.APIStatusError) as refused:
        await store(client, b"x" * 3_000_001)
    assert refused.value.status_code == 413
    with pytest.raises(openai.APIStatusError) as refused:
        await store(client, b"x" * 4_000_000)
    assert refused.value.status_code == 413
    first = await store(client, b"x" * 2_500_000)
    with pytest.raises(openai.RateLimitError) as full:
        await store(client, b"x" * 1_500_001)
    assert full.value.code == "tenant_quota"
    await client.files.delete(first)
    await store(client, b"x" * 2_500_000)
    await store(client, b"x" * 1_500_000)
    with pytest.raises(openai.RateLimitError):
        await store(client, b"")


A_FILE = {"file": ("a", b"1")}
AFTER = "expires_after[anchor]"


@pytest.mark.parametrize(
    ("data", "files", "param"),
    [
        ({}, {"purpose": (None, b"batch")}, "file"),
        ({}, A_FILE, "purpose"),
        ({"purpose": "fine-tune"}, A_FILE, "purpose"),
        ({"purpose": "batch", "more": "1"}, A_FILE, "more"),
        ({"purpose": "batch", "file": "text"}, {"x": ("a", b"1")}, "x"),
        ({AFTER: "created_at"}, A_FILE, "expires_after.seconds"),
        ({AFTER: "created_at", "expires_after[seconds]": "3599"}, A_FILE, "expires_after.seconds"),
        ({"expires_after[seconds]": "3600"}, A_FILE, "expires_after.anchor"),
    ],
)
async def test_a_bad_upload_is_refused_by_its_field(
    base_url: str, redis_client: redis.asyncio.Redis, data: dict[str, str], files: Any, param: str
) -> None:
    purpose = {} if param == "purpose" or "purpose" in files else {"purpose": "batch"}
    async with httpx.AsyncClient(base_url=base_url) as http:
        answer = await http.post("/v1/files", data=purpose | data, files=files)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await http.get("/v1/files")).json()["data"] == []


async def test_a_body_that_is_no_form_is_refused(
    base_url: str, redis_client: redis.asyncio.Redis
) -> None:
    """415 for another type; 400 for a form without a boundary or with a broken one."""
    async with httpx.AsyncClient(base_url=base_url) as http:
        for media_type, status in (
            ("application/json", 415),
            ("multipart/form-data", 400),
            ("multipart/form-data; boundary=x", 400),
        ):
            headers = {"content-type": media_type}
            answer = await http.post("/v1/files", content=b"{}", headers=headers)
            assert answer.status_code == status, answer.text


async def test_a_gateway_without_an_object_store_takes_no_files(
    gateway_url: str, redis_client: redis.asyncio.Redis
) -> None:
    """400, which clients do not repeat."""
    async with client_of(gateway_url) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            await store(client)
    assert (refused.value.status_code, refused.value.code) == (400, "no_object_store")


async def test_expired_files_are_deleted(
    client: AsyncOpenAI, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Record, content and the tenant's bytes, once their time is over."""
    short = await client.files.create(
        file=("a", CONTENT),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    kept = await store(client)
    assert short.expires_at == short.created_at + 3600
    await redis_client.set(TEST_CLOCK, 3_601_000)

    assert [file.id for file in (await client.files.list()).data] == [kept]

    async def has_no_object() -> bool:
        return await redis_client.zcard(keys.of("objects_due")) == 1

    await until(has_no_object)
    assert await redis_client.hget(keys.of("file_bytes"), "default") == str(len(CONTENT)).encode()
