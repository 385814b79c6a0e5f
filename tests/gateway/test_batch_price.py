"""BATCHWAY_BATCH_PRICE: tokens of the lane `batch` count less in a tenant's limit per minute."""

import httpx
import pytest
import redis.asyncio

from contract.keys import Keys
from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker
from tests.gateway.test_refusals import key_of

pytestmark = pytest.mark.anyio

PROMPT = "x" * 30  # a token for each letter
NUM_OUTPUT = len("Hello wörld!".encode())


@pytest.mark.parametrize(("tier", "counted"), [("flex", 21.5), ("default", 43.0)])
async def test_answers_tell_tokens_and_the_meter_counts_their_price(
    worker: FakeWorker,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    tier: str,
    counted: float,
) -> None:
    """Half of them in the lane batch; the usage of an answer stays the true number."""
    await redis_client.set(TEST_CLOCK, "=1700000000000")
    headers = await key_of(redis_client, keys, tokens_per_minute=1000)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "service_tier": tier}
    with running_gateway(make_settings(redis_server.url, batch_price=0.5)) as url:
        async with httpx.AsyncClient(base_url=url, headers=headers) as http:
            answer = await http.post("/v1/completions", json=body)
            job = (await http.get(f"/v1/jobs/{answer.headers['x-job-id']}")).json()
    usage = {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": NUM_OUTPUT,
        "total_tokens": len(PROMPT) + NUM_OUTPUT,
    }
    assert answer.json()["usage"] == job["usage"] == usage
    left = 970 if tier == "flex" else 940  # of 30 and at most 30 tokens
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(left)
    level = await redis_client.hget(keys.of("tenant", "acme"), "tokens")
    assert float(level or 0) == counted


@pytest.mark.parametrize("price", ["-0.1", "1.5", "nan", "half"])
def test_a_price_is_a_share(monkeypatch: pytest.MonkeyPatch, price: str) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://x")
    monkeypatch.setenv("BATCHWAY_BATCH_PRICE", price)
    with pytest.raises(ValueError, match="BATCHWAY_BATCH_PRICE: "):
        GatewaySettings.from_env()
