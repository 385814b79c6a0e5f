"""A Redis that would run half of a function after a power cut is warned of."""

import logging
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from contract import fitness
from contract.connection import connect
from contract.fitness import check_fitness
from infra.embedded_redis import EmbeddedRedis

pytestmark = pytest.mark.anyio

WARNING = "set its aof-load-truncated to no"


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[redis.asyncio.Redis]:
    """Of a server of its own, whose version is not known to do it right."""
    monkeypatch.setattr(fitness, "_WHOLE_SINCE_VALKEY", (99,))
    with EmbeddedRedis() as server:
        client = connect(server.url)
        yield client
        await client.aclose()


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
    """The users of a locked Redis may read INFO and no setting."""
    rights = ["+info", "+auth"]
    await client.acl_setuser("part", enabled=True, nopass=True, commands=rights)
    await client.auth("x", "part")
    await check_fitness(client)
    assert WARNING in caplog.text


async def test_a_server_that_does_it_right_is_not_warned_of(
    client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its version; Redis says none of Valkey's."""
    await client.config_set("aof-load-truncated", "yes")
    monkeypatch.setattr(fitness, "_WHOLE_SINCE_VALKEY", (7, 2))
    await check_fitness(client)
    is_valkey = "valkey_version" in await client.info("server")
    assert (WARNING in caplog.text) == (not is_valkey)
