"""A response in the background outlives workers and gateways, and its events stay the same."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.functions import Functions
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions, expected_output, output_text
from tests.fleet import Caller, WorkerProcess, fleet
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.test_stored_responses import blocks_of, first_block

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

NUM_TOKENS = 16
MODEL = HashModelOptions(eos_rate=0.0, step_s=0.3)  # the job outlasts its readers
KILLS = (3, 12)  # a worker dies after the event with this number


@pytest.mark.campaign
async def test_killed_at_every_event_it_goes_on_with_the_same_bytes(
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    functions: Functions,
    keys: Keys,
    tmp_path: Path,
) -> None:
    """Each event is read at a gateway of its own, which ends after it; workers die by kill -9. Then
    the log moves to the object store, and the rest after every event is read again."""
    fields: dict[str, Any] = {"object_store": str(tmp_path), "object_min_bytes": 64}
    settings = make_settings(redis_server.url, **fields)
    seen: list[str] = []
    async with fleet(redis_server.url, 1, MODEL, **fields) as workers:
        await Caller(functions, redis_client, keys).num_workers(1)
        body = {"model": "m", "input": "Hi", "background": True, "max_output_tokens": NUM_TOKENS}
        with running_gateway(settings) as url:
            async with httpx.AsyncClient(base_url=url, timeout=30) as http:
                created = (await http.post("/v1/responses", json=body)).json()
        path = f"/v1/responses/{created['id']}?stream=true"
        job_id = "job-" + created["id"].removeprefix("resp_")
        while not seen or "response.incomplete" not in seen[-1]:
            with running_gateway(settings) as url:
                asked = url + path + (f"&starting_after={len(seen) - 1}" if seen else "")
                async with (
                    httpx.AsyncClient(timeout=30) as http,
                    http.stream("GET", asked) as answer,
                ):
                    seen.append(await first_block(answer))
            if len(seen) - 1 in KILLS:
                workers[-1].kill()
                workers.append(WorkerProcess(redis_server.url, MODEL, **fields))

    found = await functions.read(job_id, "default")
    assert found is not None
    view, _ = found
    assert view.result is not None  # the object store has the log
    assert view.attempt > 1
    with running_gateway(settings) as url:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            whole = blocks_of((await http.get(path)).text)
            assert seen == whole[:-1]
            for number in range(len(seen)):
                rest = await http.get(f"{path}&starting_after={number}")
                assert blocks_of(rest.text) == whole[number + 1 :]
            response = (await http.get(f"/v1/responses/{created['id']}")).json()
    output_ids, _ = expected_output(view.job.prompt_ids, view.job.params, eos_rate=0.0)
    assert response["output"][0]["content"][0]["text"] == output_text(output_ids)
