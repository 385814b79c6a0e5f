"""`batchway up` on the demo model, once for all tests of this folder: one process runs them."""

from collections.abc import Iterator

import pytest
import redis

from infra.embedded_redis import EmbeddedRedis
from tests.e2e.questions import KEYS
from tests.infra.stack import Stack, running_demo_stack


@pytest.fixture(scope="package")
def stack(redis_server: EmbeddedRedis) -> Iterator[Stack]:
    """On a Redis that the tests may look into."""
    arguments = (f"--redis-url={redis_server.url}", f"--namespace={KEYS.namespace}")
    with running_demo_stack(*arguments) as stack:
        yield stack


@pytest.fixture
def redis_view(redis_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield client
