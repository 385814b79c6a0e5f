"""A stream of Anthropic's messages outlives its workers, on one connection."""

from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.functions import Functions
from contract.jobs import SamplingParams
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions, encode_text, expected_output, output_text
from tests.fleet import Caller, WorkerProcess, fleet
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.test_messages import accumulated, events_in

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

MODEL = HashModelOptions(eos_rate=0.0, step_s=0.1)  # the job outlasts its workers
PARAMS = SamplingParams(max_tokens=24, seed=0, temperature=0.0)
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": PARAMS.max_tokens,
    "temperature": 0,
    "stream": True,
}
KILLS = (3, 9)  # a worker dies after so many deltas
STOP_AT = 18  # characters


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_killed_workers_cost_no_token_and_repeat_none(
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    functions: Functions,
    keys: Keys,
    is_stopped: bool,
) -> None:
    """Up to `max_tokens`, or to a stop string, which the third worker finds."""
    prompt_ids = encode_text("user: Hi\nassistant: ")
    text = output_text(expected_output(prompt_ids, PARAMS, eos_rate=0.0)[0])
    stop = text[STOP_AT : STOP_AT + 2] if is_stopped else None
    body = BODY | ({"stop_sequences": [stop]} if stop else {})
    lines, num_deltas = list[str](), 0
    async with fleet(redis_server.url, 1, MODEL, lease_s=1.0) as workers:
        await Caller(functions, redis_client, keys).num_workers(1)
        with running_gateway(make_settings(redis_server.url)) as url:
            async with (
                httpx.AsyncClient(base_url=url, timeout=60) as http,
                http.stream("POST", "/v1/messages", json=body) as answer,
            ):
                async for line in answer.aiter_lines():
                    lines.append(line)
                    if line == "event: content_block_delta":
                        num_deltas += 1
                        if num_deltas in KILLS:
                            workers[-1].kill()
                            workers.append(WorkerProcess(redis_server.url, MODEL, lease_s=1.0))
    message = accumulated(events_in("\n".join(lines) + "\n"))
    assert len(workers) == 1 + len(KILLS)
    assert message["content"] == [{"type": "text", "text": text.partition(stop or "\0")[0]}]
    reason = "stop_sequence" if stop else "max_tokens"
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    assert stop or message["usage"]["output_tokens"] == PARAMS.max_tokens
