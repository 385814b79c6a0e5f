"""Ten thousand canaries in rejected requests: no log of the gateway contains one."""

import asyncio
import logging

import httpx
import pytest

from tests.gateway.fake_worker import MODEL, FakeWorker, says

pytestmark = pytest.mark.anyio

NUM_ROUNDS = 40
PER_ROUND = 250


async def test_no_canary_is_ever_logged(
    idle_worker: FakeWorker,
    http: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In prompts, names, values, keys, queries, paths and headers; also in accepted requests."""
    caplog.set_level(logging.DEBUG)
    for number in range(NUM_ROUNDS):
        canaries = [f"canary-{number}-{i}" for i in range(PER_ROUND)]
        answer = await _fails(http, number, canaries)
        assert answer.status_code >= 400, number
    accepted = {"model": MODEL, "prompt": "canary-accepted"}
    call = {"endpoint": "/v1/completions", "body": accepted}
    assert (await http.post("/v1/jobs?q=canary-accepted", json=call)).status_code == 202
    answer_to_call = asyncio.create_task(http.post("/v1/completions", json=accepted))
    for _ in range(2):
        await idle_worker.run(await idle_worker.claim(), says("canary-output"))
    assert (await answer_to_call).status_code == 200
    ours = [each for each in caplog.records if not each.name.startswith(("httpx", "httpcore"))]
    lines = "\n".join(f"{each.getMessage()} {each.exc_info} {vars(each)}" for each in ours)
    assert "accepted job_id=" in lines  # what is logged is seen here
    assert "answered job_id=" in lines
    assert "canary-" not in lines


async def _fails(http: httpx.AsyncClient, number: int, canaries: list[str]) -> httpx.Response:
    """One rejected call with canaries in every part that callers choose."""
    key, query, header, request_id, prompt, *more = canaries
    headers = {
        "authorization": f"Bearer {key}",
        "x-canary": header,
        "x-request-id": f"{request_id} is no id",
        "cookie": more[0],
        "user-agent": more[1],
    }
    body: dict[str, object] = {"model": MODEL, "prompt": " ".join([prompt, *more[2:]])}
    bodies: list[dict[str, object]] = [
        body | {prompt: prompt},
        body | {"n": prompt},
        body | {"model": prompt},
        body | {"stop": [prompt] * 5},
        body | {"prompt": [prompt, ""]},
        body | {"logit_bias": {prompt: 1}},
        body | {"tools": [prompt]},
        {"endpoint": "/v1/completions", "body": body, "lane": prompt},
    ]
    paths = ("completions", "chat/completions", "embeddings", "jobs", prompt)
    url = f"/v1/{paths[number // 8 % 5]}?q={query}"
    return await http.post(url, json=bodies[number % 8], headers=headers)
