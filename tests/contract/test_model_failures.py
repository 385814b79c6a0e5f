"""Reports of models that cannot stay up."""

import pytest
import redis.asyncio

from contract.catalogue import Catalogue
from contract.keys import Keys
from contract.starts import MAX_REASON, Starts
from tests.gateway.fake_worker import MODEL, publish_model

pytestmark = pytest.mark.anyio


@pytest.fixture
def failures(redis_client: redis.asyncio.Redis, keys: Keys) -> Starts:
    return Starts(redis_client, keys)


async def test_a_report_says_why_and_when_the_next_try_is(
    redis_client: redis.asyncio.Redis, keys: Keys, failures: Starts
) -> None:
    """Also of a model that was never published; since when, by the first report."""
    await publish_model(redis_client, keys)
    assert await failures.failures() == {}
    await failures.report_failure("never", "no memory" * 100, retry_in_s=30.0)
    first = (await failures.failures())["never"]
    assert first.reason == ("no memory" * 100)[:MAX_REASON]
    assert 25 < first.retry_in_s <= 30
    await failures.report_failure("never", "no disk", retry_in_s=0.0)
    found = await failures.failures()
    assert list(found) == ["never"]
    assert (found["never"].reason, found["never"].since_s) == ("no disk", first.since_s)
    assert found["never"].retry_in_s == 0
    assert [card.name for card in await Catalogue(redis_client, keys).models()] == [MODEL]


async def test_a_worker_that_is_ready_ends_a_report(
    redis_client: redis.asyncio.Redis, keys: Keys, failures: Starts
) -> None:
    """As does who begins anew; what is known of starts stays."""
    for model in ("a", "b", "c"):
        await failures.report_failure(model, "no memory", retry_in_s=30.0)
    await Starts(redis_client, keys).measured("a", 2.0)
    await failures.forget_failures(["b"])
    assert list(await failures.failures()) == ["c"]
    assert await redis_client.hgetall(keys.of("pool", "a")) == {b"start_ms": b"2000"}


async def test_a_report_is_forgotten_if_nobody_tries_any_more(
    redis_client: redis.asyncio.Redis, keys: Keys, failures: Starts
) -> None:
    """Half an hour after the next try was due."""
    await failures.report_failure("a", "no memory", retry_in_s=60.0)
    assert 1_850 < await redis_client.ttl(keys.of("pool", "a")) <= 1_860


@pytest.mark.parametrize("value", ["x", "", "9" * 400])
async def test_a_report_that_cannot_be_read_is_none(
    redis_client: redis.asyncio.Redis, keys: Keys, failures: Starts, value: str
) -> None:
    """Nor is a key of another type; the other reports are read."""
    for model in ("a", "b", "c"):
        await failures.report_failure(model, "no memory", retry_in_s=60.0)
    await redis_client.hset(keys.of("pool", "a"), "retry_at", value)
    await redis_client.delete(keys.of("pool", "b"))
    await redis_client.set(keys.of("pool", "b"), "x")
    assert list(await failures.failures()) == ["c"]
