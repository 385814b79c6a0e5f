"""Real parts for tests: a Redis of their own, the function library, a client for each test."""

import gc
import os
import shutil
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio

from contract.connection import connect
from contract.functions import Functions
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis

# Without a GPU, Triton's kernels run in its interpreter; it must know before its first import.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# BATCHWAY_CPU_ISA=avx2 or avx512 runs the tests as on a processor that has no more than that. torch
# and oneDNN have variables of their own, which they read when they are imported.
_LIMITS = {"avx2": ("avx2", "AVX2"), "avx512": ("avx512", "AVX512_CORE")}
if (_isa := os.environ.get("BATCHWAY_CPU_ISA", "")) in _LIMITS:
    os.environ["ATEN_CPU_CAPABILITY"], os.environ["ONEDNN_MAX_CPU_ISA"] = _LIMITS[_isa]


def pytest_collection() -> None:
    """What is imported stays: no search for garbage in it."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole processes come first: they wait most, and others use that time."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


def pytest_collection_finish() -> None:
    """Nor later: torch and three thousand tests are objects enough to search for half a second."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
async def redis_client(redis_server: EmbeddedRedis) -> AsyncIterator[redis.asyncio.Redis]:
    """An empty server with the library loaded."""
    client = connect(redis_server.url)
    await client.flushall()
    await ensure_library(client)
    yield client
    await client.aclose()


@pytest.fixture
def keys() -> Keys:
    return Keys("test")


@pytest.fixture
def functions(redis_client: redis.asyncio.Redis, keys: Keys) -> Functions:
    return Functions(redis_client, keys)
