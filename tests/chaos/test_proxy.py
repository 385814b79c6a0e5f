"""The proxy in front of a real Redis: each fault has the promised effect."""

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
    link = Link(lambda: Path(redis_server.url.removeprefix("unix://")))
    await link.start()
    yield link
    await link.close()


def client_of(link: Link) -> redis.asyncio.Redis:
    """A client that never repeats a command."""
    return redis.asyncio.Redis.from_url(link.url, retry=Retry(NoBackoff(), 0), socket_timeout=5)


async def test_an_undisturbed_link_passes_everything(link: Link) -> None:
    """Also large values, in both directions."""
    async with client_of(link) as client:
        await client.set("k", b"x" * 300_000)
        assert await client.get("k") == b"x" * 300_000
    assert not link.effects


@pytest.mark.parametrize("kind", ["lose", "cut"])
async def test_a_command_may_be_executed_and_its_reply_lost(link: Link, kind: Doom) -> None:
    """The next command, on a new connection, finds its effect."""
    async with client_of(link) as client:
        await client.set("k", 1)
        link.doom(kind)
        with pytest.raises(redis.exceptions.ConnectionError):
            await client.incr("k")
        await link.struck.wait()
        assert await client.get("k") == b"2"
    assert link.effects[kind] == 1


async def test_a_cut_link_delivers_no_command(link: Link) -> None:
    """On neither an existing nor a new connection, until the link is restored."""
    async with client_of(link) as client:
        await client.set("k", 1)
        with link.refused(), pytest.raises(redis.exceptions.ConnectionError):
            await client.incr("k")
        assert await client.get("k") == b"1"


async def test_held_replies_are_delivered_on_release(link: Link) -> None:
    """The command is executed meanwhile."""
    async with client_of(link) as client:
        await client.set("k", 1)
        link.passes_replies.clear()
        asked = asyncio.ensure_future(client.incr("k"))
        done, _ = await asyncio.wait([asked], timeout=0.1)
        assert not done
        link.passes_replies.set()
        assert await asked == 2
