"""`batchway up` on the demo model, once for each engine and all tests of this folder."""

from collections.abc import Iterator

import pytest
import redis

from infra.embedded_redis import EmbeddedRedis
from tests.cluster import plain_client
from tests.e2e.questions import KEYS
from tests.infra.stack import Stack, running_demo_stack
from tests.vllm_environment import vllm_arguments


@pytest.fixture(scope="package", params=["own", pytest.param("vllm", marks=pytest.mark.campaign)])
def stack(redis_server: EmbeddedRedis, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Its Redis can be read by the tests."""
    arguments: tuple[str, ...] = (
        f"--redis-url={redis_server.url}",
        f"--namespace={KEYS.namespace}",
    )
    if request.param == "vllm":
        arguments += vllm_arguments()
    with running_demo_stack(*arguments) as stack:
        yield stack


@pytest.fixture
def redis_view(redis_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with plain_client(redis_server.url, KEYS) as client:
        yield client
