"""An outbox, and gateways for the tests of callbacks over HTTP."""

import pytest
import redis.asyncio

from contract.keys import Keys
from contract.outbox import Outbox
from tests.gateway.conftest import gateway_url, http, idle_worker

__all__ = ["gateway_url", "http", "idle_worker"]


@pytest.fixture
def outbox(redis_client: redis.asyncio.Redis, keys: Keys) -> Outbox:
    return Outbox(redis_client, keys)
