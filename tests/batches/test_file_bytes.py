"""The bytes of a tenant's files: each file's are given back exactly once."""

import asyncio
import contextlib
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
from tests.batches.test_files import CONTENT, store
from tests.clock import TEST_CLOCK
from tests.fleet import until
from tests.gateway.conftest import make_settings, running_gateway

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


async def test_an_expired_file_is_unknown_where_no_gateway_deletes_it(
    files: Files, redis_client: redis.asyncio.Redis
) -> None:
    """It is neither found nor listed; one that has not expired is."""
    short, long = new_file_id(), new_file_id()
    for file_id, lifetime_s in ((short, 3600), (long, 7200)):
        file = StoredFile(id=file_id, tenant=TENANT, num_bytes=1, purpose="batch", filename="a")
        await files.add(file, lifetime_s=lifetime_s, max_tenant_bytes=0)
    await redis_client.set(TEST_CLOCK, 3_601_000)
    assert await files.find(short, TENANT) is None
    found = await files.find(long, TENANT)
    assert found is not None
    listed = await files.page(TENANT, purpose="", after="", is_oldest_first=True, max_files=1)
    assert listed == [found]


async def test_a_gateway_that_runs_no_batches_deletes_expired_files(
    store_setting: str,
    redis_server: EmbeddedRedis,
    files: Files,
    objects: DirectoryStore,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
) -> None:
    """The tenant gets its bytes back."""
    settings = make_settings(redis_server.url, object_store=store_setting, feeds_batches=False)
    with running_gateway(settings) as url:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
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


async def test_a_file_that_expires_beside_a_deletion_is_given_back_once(
    client: AsyncOpenAI,
    kept: str,
    files: Files,
    store_setting: str,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
) -> None:
    """Two gateways forget it, and its owner deletes it at the same time."""
    file = await client.files.create(
        file=("a", CONTENT),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    settings = make_settings(redis_server.url, object_store=store_setting)
    with running_gateway(settings):
        await redis_client.set(TEST_CLOCK, 3_601_000)
        with contextlib.suppress(openai.NotFoundError):
            await client.files.delete(file.id)
        await until_not_due(redis_client, keys, file.id)
    assert await files.tenant_bytes(TENANT) == len(CONTENT)


async def test_a_result_file_that_is_written_again_has_its_new_size(
    files: Files, redis_client: redis.asyncio.Redis
) -> None:
    """A feeder that takes over may have more results; deleting the file gives all bytes back."""
    file_id = new_file_id()
    for num_bytes in (5, 9, 9, 7):
        file = StoredFile(
            id=file_id, tenant=TENANT, num_bytes=num_bytes, purpose="batch_output", filename="a"
        )
        await files.add(file, lifetime_s=3600, max_tenant_bytes=0)
        found = await files.find(file_id, TENANT)
        assert found is not None
        assert (found.num_bytes, await files.tenant_bytes(TENANT)) == (num_bytes, num_bytes)
    assert await files.drop(file_id)
    assert await files.tenant_bytes(TENANT) == 0
