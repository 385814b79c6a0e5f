"""A caller of workers, for the tests of all folders."""

import pytest
import redis.asyncio

from contract.functions import Functions
from contract.keys import Keys
from tests.fleet import Caller


@pytest.fixture
def caller(functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys) -> Caller:
    return Caller(functions, redis_client, keys)
