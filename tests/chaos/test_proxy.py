"""The cutting proxy in front of a real Redis: what it promises to do to a reply is what happens."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from infra.embedded_redis import EmbeddedRedis
from tests.chaos.proxy import Doom, Link

pytestmark = pytest.mark.anyio


@pytest.fixture
async def link(redis_server: EmbeddedRedis) -> AsyncIterator[Link]:
    link = Link(Path(redis_server.url.removeprefix("unix://")))
    await link.start()
    yield link
    await link.close()


def client_of(link: Link) -> redis.asyncio.Redis:
    """Never repeats a command."""
    return redis.asyncio.Redis.from_url(link.url, retry=Retry(NoBackoff(), 0), socket_timeout=5)


async def test_an_undisturbed_link_passes_everything(link: Link) -> None:
    """Large values too, both ways."""
    async with client_of(link) as client:
        await client.set("k", b"x" * 300_000)
        assert await client.get("k") == b"x" * 300_000
    assert not link.effects


@pytest.mark.parametrize("kind", ["lose", "cut"])
async def test_a_command_may_be_executed_and_its_reply_lost(link: Link, kind: Doom) -> None:
    """The next one, on a new connection, finds what it did."""
    async with client_of(link) as client:
        await client.set("k", 1)
        link.doom(kind)
        with pytest.raises(redis.exceptions.ConnectionError):
            await client.incr("k")
        await link.struck.wait()
        assert await client.get("k") == b"2"
    assert link.effects[kind] == 1


async def test_a_parted_link_takes_no_command(link: Link) -> None:
    """Neither on a connection that it had nor on a new one, until it is whole again."""
    async with client_of(link) as client:
        await client.set("k", 1)
        with link.refused(), pytest.raises(redis.exceptions.ConnectionError):
            await client.incr("k")
        assert await client.get("k") == b"1"


async def test_held_replies_are_passed_when_they_may(link: Link) -> None:
    """The command is done meanwhile."""
    async with client_of(link) as client:
        await client.set("k", 1)
        link.passes_replies.clear()
        asked = asyncio.ensure_future(client.incr("k"))
        done, _ = await asyncio.wait([asked], timeout=0.1)
        assert not done
        link.passes_replies.set()
        assert await asked == 2
