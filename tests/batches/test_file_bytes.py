"""The bytes of a tenant's files: each file's are given back exactly once."""

import asyncio
import io
import shutil
from pathlib import Path

import openai
import pytest
import redis.asyncio
from openai import AsyncOpenAI

from contract.files import Files, StoredFile, content_key, new_file_id
from contract.keys import Keys
from contract.payloads.directory import DirectoryStore
from contract.payloads.store import PayloadLost
from infra.embedded_redis import EmbeddedRedis
from tests.batches.conftest import gateway_client
from tests.batches.test_files import CONTENT, store
from tests.clock import TEST_CLOCK
from tests.fleet import until
from tests.gateway.conftest import make_settings

pytestmark = pytest.mark.anyio

TENANT = "default"


@pytest.fixture
def files(redis_client: redis.asyncio.Redis, keys: Keys) -> Files:
    return Files(redis_client, keys)


@pytest.fixture
async def kept(client: AsyncOpenAI) -> str:
    """A file that nobody deletes."""
    return await store(client)


@pytest.fixture
def objects(store_setting: str) -> DirectoryStore:
    return DirectoryStore(Path(store_setting))


async def add(files: Files, objects: DirectoryStore) -> str:
    """Stores a file as a gateway does, step by step; its id."""
    file_id = new_file_id()
    await files.begin(file_id)
    objects.write(content_key(file_id), io.BytesIO(CONTENT))
    file = StoredFile(
        id=file_id, tenant=TENANT, num_bytes=len(CONTENT), purpose="batch", filename="a"
    )
    await files.add(file, lifetime_s=3600, max_tenant_bytes=0)
    assert await files.tenant_bytes(TENANT) == 2 * len(CONTENT)
    return file_id


async def until_not_due(client: redis.asyncio.Redis, keys: Keys, file_id: str) -> None:
    """Until a gateway has reported that the file's content is deleted."""

    async def is_deleted() -> bool:
        return await client.zscore(keys.of("objects_due"), file_id) is None

    await until(is_deleted)


@pytest.mark.parametrize("is_deleted", [False, True], ids=["before", "after"])
async def test_a_gateway_died_where_it_deletes_a_content(
    kept: str,
    files: Files,
    objects: DirectoryStore,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    is_deleted: bool,
) -> None:
    """The record is gone, and its bytes; another gateway deletes the content, or finds none, and
    gives back no more."""
    file_id = await add(files, objects)
    assert await files.drop(file_id, TENANT)
    if is_deleted:
        objects.delete_job(file_id)
    assert await files.tenant_bytes(TENANT) == len(CONTENT)
    assert not await files.drop(file_id, TENANT)
    await until_not_due(redis_client, keys, file_id)
    with pytest.raises(PayloadLost):
        objects.read(content_key(file_id), 0, 1)
    assert await files.tenant_bytes(TENANT) == len(CONTENT)


async def test_a_gateway_died_before_it_recorded_a_content(
    kept: str,
    files: Files,
    client: AsyncOpenAI,
    objects: DirectoryStore,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
) -> None:
    """A content without a record counts for nothing, and is deleted after an hour."""
    file_id = new_file_id()
    await files.begin(file_id)
    objects.write(content_key(file_id), io.BytesIO(CONTENT))
    assert await files.tenant_bytes(TENANT) == len(CONTENT)
    with pytest.raises(openai.NotFoundError):
        await client.files.delete(file_id)
    assert await files.tenant_bytes(TENANT) == len(CONTENT)
    await redis_client.set(TEST_CLOCK, 3_601_000)
    await until_not_due(redis_client, keys, file_id)
    with pytest.raises(PayloadLost):
        objects.read(content_key(file_id), 0, 1)
    assert (await client.files.content(kept)).content == CONTENT


@pytest.fixture
def refusing_store(base_url: str, store_setting: str) -> None:
    """A store that no longer takes objects."""
    path = Path(store_setting)
    if path.exists():
        shutil.rmtree(path)
    path.write_bytes(b"no directory")


async def test_a_content_is_announced_before_it_is_written(
    client: AsyncOpenAI, refusing_store: None, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The store refuses it: that its remains are to be deleted is known."""
    with pytest.raises(openai.InternalServerError):
        await store(client)
    assert await redis_client.zcard(keys.of("objects_due")) == 1


async def test_a_gateway_that_runs_no_batches_deletes_expired_files(
    store_setting: str,
    redis_server: EmbeddedRedis,
    files: Files,
    objects: DirectoryStore,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
) -> None:
    settings = make_settings(redis_server.url, object_store=store_setting, feeds_batches=False)
    async with gateway_client(settings) as client:
        file_id = await store(client)
        await redis_client.set(TEST_CLOCK, 31 * 86_400_000)
        await until_not_due(redis_client, keys, file_id)
    assert await files.tenant_bytes(TENANT) == 0
    with pytest.raises(PayloadLost):
        objects.read(content_key(file_id), 0, 1)


async def test_a_file_that_many_delete_is_given_back_once(
    client: AsyncOpenAI, kept: str, files: Files
) -> None:
    file_id = await store(client)
    deleting = (client.files.delete(file_id) for _ in range(8))
    replies = await asyncio.gather(*deleting, return_exceptions=True)
    refused = [reply for reply in replies if isinstance(reply, openai.NotFoundError)]
    assert len(refused) == 7
    assert await files.tenant_bytes(TENANT) == len(CONTENT)
