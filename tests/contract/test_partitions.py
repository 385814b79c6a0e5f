"""The number of a namespace's partitions, and which of them is a tenant's."""

from collections import Counter

import pytest
import redis.asyncio

from contract.errors import BrokerUnfit
from contract.files import Files, StoredFile
from contract.functions import Functions
from contract.keys import Keys
from contract.partitions import (
    PartitionsDiffer,
    known_number,
    made_number,
    partition_of_tenant,
)
from tests.contract.some_calls import make_job, make_submission

pytestmark = pytest.mark.anyio

KEYS = Keys("cells")


@pytest.fixture
def keys() -> Keys:
    """Of a namespace that no gateway of another test has made."""
    return KEYS


def test_a_tenant_s_partition_follows_from_its_name() -> None:
    """For good: other values would part tenants from what they have."""
    assert [partition_of_tenant(tenant, 1) for tenant in ("a", "b")] == [0, 0]
    found = [partition_of_tenant(tenant, 16) for tenant in ("default", "acme", "a", "é")]
    assert found == [13, 0, 10, 3]


def test_many_tenants_are_spread_over_all_partitions() -> None:
    counts = Counter(partition_of_tenant(f"tenant-{n}", 16) for n in range(16_000))
    assert len(counts) == 16
    assert min(counts.values()) > 850
    assert max(counts.values()) < 1_150


@pytest.mark.parametrize(("given", "number"), [(None, 1), (1, 1), (16, 16)])
async def test_the_first_process_makes_the_namespace(
    redis_client: redis.asyncio.Redis, given: int | None, number: int
) -> None:
    assert await known_number(redis_client, KEYS, None) is None
    assert await made_number(redis_client, KEYS, given) == number
    assert await made_number(redis_client, KEYS, None) == number
    assert await known_number(redis_client, KEYS, number) == number


async def test_a_process_with_another_number_is_refused(redis_client: redis.asyncio.Redis) -> None:
    """The message has both, and Redis stays as it was."""
    await made_number(redis_client, KEYS, 4)
    for find in (made_number, known_number):
        with pytest.raises(PartitionsDiffer, match=r"has 4 partitions.* given 2:"):
            await find(redis_client, KEYS, 2)
    assert await known_number(redis_client, KEYS, None) == 4


@pytest.mark.parametrize("has", ["jobs", "files"])
async def test_a_namespace_that_was_in_use_is_one_partition(
    redis_client: redis.asyncio.Redis, functions: Functions, has: str
) -> None:
    """One of a release that stored no number keeps its jobs and files."""
    job, files = make_job(), Files(redis_client, KEYS)
    file = StoredFile(id="file-1", tenant="t", num_bytes=1, purpose="batch", filename="f")
    if has == "jobs":
        await functions.submit(job, make_submission())
    else:
        await files.add(file, lifetime_s=60.0, max_tenant_bytes=0)
    with pytest.raises(PartitionsDiffer, match=r"has 1 partitions.* given 4:"):
        await made_number(redis_client, KEYS, 4)
    assert await made_number(redis_client, KEYS, None) == 1
    if has == "jobs":
        assert await functions.read(job.id, job.tenant) is not None
    else:
        assert await files.find(file.id, "t") is not None


async def test_a_namespace_whose_tenants_moved_is_refused(
    redis_client: redis.asyncio.Redis,
) -> None:
    """It is told what to do, and nothing is written. Once partition 0 alone is left, it is one."""
    key = KEYS.of("partitions")
    for field, value in (
        ("version", "3"),
        ("shared_ms", "9"),
        ("0", "1 active"),
        ("1", "1 active"),
    ):
        await redis_client.hset(key, field, value)
    for given in (None, 2):
        with pytest.raises(BrokerUnfit, match=r"drain all but partition 0 .* or use another name"):
            await made_number(redis_client, KEYS, given)
    assert await redis_client.keys(f"{KEYS.tag}*") == [key.encode()]
    await redis_client.hdel(key, "1")
    assert await made_number(redis_client, KEYS, None) == 1
