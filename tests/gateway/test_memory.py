"""How much memory calls of megabytes take: a bound that their length does not decide."""

import asyncio
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.connection import end_tasks
from contract.functions import Functions
from contract.keys import Keys
from gateway import memory
from infra.embedded_redis import EmbeddedRedis
from tests.fleet import until
from tests.gateway.conftest import gateway_process
from tests.gateway.fake_worker import FakeWorker, publish_model
from tests.gateway.vector_worker import (
    CARDS,
    EMBEDDER,
    RERANKER,
    TEMPLATED,
    publish_vector_model,
    vector_worker,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.campaign,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

LONG = "what a long text " * 230_000  # 3.9 MB
MANY = ["what a text " * 160] * 500
MAX_PEAK_MB = 250  # without a bound, one call took 632
MAX_KEPT_MB = 45


@pytest.fixture
def process(redis_server: EmbeddedRedis) -> Iterator[tuple[int, str]]:
    """A gateway's process id and URL, whatever object store tests before have named."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    with gateway_process(redis_server.url) as (child, url):
        yield child.pid, url


def memory_mb(pid: int, name: str) -> float:
    """`VmRSS`, or `VmHWM`: the most that it ever was."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [size] = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(size) / 1024


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "embeddings": ("/v1/embeddings", {"model": EMBEDDER, "input": LONG}),
    "embeddings of many": ("/v1/embeddings", {"model": EMBEDDER, "input": MANY}),
    "rerank": ("/v1/rerank", {"model": RERANKER, "query": "q", "documents": [LONG]}),
    "rerank of many": ("/v1/rerank", {"model": RERANKER, "query": "q", "documents": MANY}),
    "rendered": ("/v1/rerank", {"model": TEMPLATED, "query": "q", "documents": [LONG]}),
    "score": ("/v1/score", {"model": RERANKER, "text_1": LONG, "text_2": "a"}),
    "completion": ("/v1/completions", {"model": "hash", "prompt": LONG}),
    "chat": (
        "/v1/chat/completions",
        {"model": "hash", "messages": [{"role": "user", "content": LONG}]},
    ),
}


async def test_calls_of_megabytes_give_their_memory_back(
    process: tuple[int, str],
    redis_client: redis.asyncio.Redis,
    functions: Functions,
    keys: Keys,
) -> None:
    """Refused ones, two at a time, and quotes of those that are cut."""
    pid, url = process
    await publish_model(redis_client, keys)
    await FakeWorker(functions).beat()
    for name in CARDS:
        await publish_vector_model(redis_client, keys, name)
        await vector_worker(functions, name).beat()
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def post(path: str, body: object, text: str = LONG) -> int:
            content = json.dumps(body).replace(LONG, text).encode()
            answer = await http.post(
                path, content=content, headers={"content-type": "application/json"}
            )
            return answer.status_code

        for path, body in CALLS.values():  # loads tokenizers, starts template processes
            assert await post(path, body, "ab" * 9_000) == 400
        start_mb = memory_mb(pid, "VmRSS")
        found = {}
        for name, (path, body) in CALLS.items():
            cut = {"endpoint": path, "body": body | {"truncate_prompt_tokens": 32}}
            assert {*await asyncio.gather(post(path, body), post(path, body))} == {400}, name
            assert await post("/v1/quote", cut) == 200, name
            found[name] = memory_mb(pid, "VmHWM"), memory_mb(pid, "VmRSS")
        assert memory_mb(pid, "VmHWM") < MAX_PEAK_MB, (start_mb, found)
        assert memory_mb(pid, "VmRSS") < start_mb + MAX_KEPT_MB, (start_mb, found)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
async def test_free_memory_below_what_is_used_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """malloc by itself keeps it where a block above is in use."""
    monkeypatch.setattr(memory, "_TRIM_S", 0.0)
    blocks = [bytes(60_000) for _ in range(2_000)]
    before_mb = memory_mb(os.getpid(), "VmRSS")
    blocks = blocks[-1:]
    trimming = asyncio.create_task(memory.keep_trimmed())

    async def is_trimmed() -> bool:
        return memory_mb(os.getpid(), "VmRSS") <= before_mb - 50

    await until(is_trimmed)
    await end_tasks(trimming)
    assert blocks
