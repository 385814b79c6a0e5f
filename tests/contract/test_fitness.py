"""Warnings about a Redis that could replay half of a function after a power failure, or evict."""

import logging
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from contract import library
from contract.connection import connect
from contract.errors import BrokerUnfit
from contract.keys import Keys
from contract.library import check_fitness
from infra.embedded_redis import EmbeddedRedis

pytestmark = pytest.mark.anyio

WARNING = "set its aof-load-truncated to no"


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of its own server, whose version is not known to be safe."""
    monkeypatch.setattr(library, "_WHOLE_SINCE_VALKEY", (99,))
    with EmbeddedRedis() as server:
        client = connect(server.url, Keys("test"))
        yield client
        await client.aclose()


@pytest.mark.parametrize("policy", ["volatile-lru", "volatile-ttl", "allkeys-lru"])
async def test_a_policy_that_evicts_only_what_has_ended_is_a_warning(
    client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    """ElastiCache Serverless has volatile-lru alone. One that evicts the queue is refused."""
    await client.config_set("maxmemory-policy", policy)
    if policy == "allkeys-lru":
        with pytest.raises(BrokerUnfit, match="its maxmemory-policy is allkeys-lru"):
            await check_fitness(client)
        return
    await check_fitness(client)
    assert f"drops results, idempotency keys and callbacks early (maxmemory-policy {policy})" in (
        caplog.text
    )


@pytest.mark.parametrize(
    ("appendonly", "load_truncated", "is_warned"),
    [("yes", "yes", True), ("yes", "no", False), ("no", "yes", False)],
)
async def test_the_warning_depends_on_two_settings(
    client: redis.asyncio.Redis,
    caplog: pytest.LogCaptureFixture,
    appendonly: str,
    load_truncated: str,
    is_warned: bool,
) -> None:
    await client.config_set("appendonly", appendonly)
    await client.config_set("aof-load-truncated", load_truncated)
    with caplog.at_level(logging.WARNING):
        await check_fitness(client)
    assert (WARNING in caplog.text) == is_warned


async def test_a_denied_command_is_a_warning(
    client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """In a Redis with ACLs, the user may run INFO but not read settings."""
    rights = ["+info", "+auth"]
    await client.acl_setuser("part", enabled=True, nopass=True, commands=rights)
    await client.auth("x", "part")
    await check_fitness(client)
    assert WARNING in caplog.text


async def test_a_safe_version_gives_no_warning(
    client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of Valkey can be known to be safe; Redis always gives the warning."""
    await client.config_set("aof-load-truncated", "yes")
    monkeypatch.setattr(library, "_WHOLE_SINCE_VALKEY", (7, 2))
    await check_fitness(client)
    is_valkey = "valkey_version" in await client.info("server")
    assert (WARNING in caplog.text) == (not is_valkey)
