"""A world for each test, and the calls of scripts on it."""

from collections.abc import Iterator

import pytest

from infra.embedded_redis import EmbeddedRedis
from tests.oracle.scripts import Calls
from tests.oracle.world import World, new_world


@pytest.fixture
def world(redis_server: EmbeddedRedis) -> Iterator[World]:
    with new_world(redis_server.url) as world:
        yield world


@pytest.fixture
def calls(world: World) -> Calls:
    return Calls(world)
