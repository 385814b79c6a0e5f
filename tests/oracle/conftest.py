"""A world for each test."""

from collections.abc import Iterator

import pytest

from infra.embedded_redis import EmbeddedRedis
from tests.oracle.world import World, new_world


@pytest.fixture
def world(redis_server: EmbeddedRedis) -> Iterator[World]:
    with new_world(redis_server.url) as world:
        yield world
