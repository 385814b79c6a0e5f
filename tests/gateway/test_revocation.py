"""A revoked key: its calls end within five seconds, and their jobs as if the caller had left."""

import asyncio
from functools import partial
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.api_keys import ApiKeys, KeyTerms
from contract.function_types import Claimed
from contract.jobs import JobStatus
from contract.keys import Keys
from tests.fleet import until
from tests.gateway.conftest import Gateways
from tests.gateway.fake_worker import MODEL, FakeWorker, says

pytestmark = pytest.mark.anyio

PROMISED_S = 5
BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "ab"}]}
ASKED: dict[str, Any] = {"model": MODEL, "input": "ab"}
LATER: dict[str, Any] = {"on_disconnect": "continue"}
STREAM: dict[str, Any] = {"stream": True}


async def bearer(api_keys: ApiKeys, **options: Any) -> tuple[dict[str, str], str]:
    """The header and the prefix of a new key."""
    key, prefix = await api_keys.create(KeyTerms(tenant="acme"), **options)
    return {"authorization": f"Bearer {key}"}, prefix


CALLS: list[tuple[str, dict[str, Any], JobStatus]] = [
    ("/v1/completions", BODY, JobStatus.CANCELLED),
    ("/v1/completions", BODY | LATER, JobStatus.STREAMING),
    ("/v1/completions", BODY | STREAM, JobStatus.CANCELLED),
    ("/v1/chat/completions", CHAT | STREAM, JobStatus.CANCELLED),
    ("/v1/chat/completions", CHAT | STREAM | LATER, JobStatus.STREAMING),
    ("/v1/responses", ASKED, JobStatus.CANCELLED),
    ("/v1/responses", ASKED | STREAM, JobStatus.CANCELLED),
    ("/v1/responses", ASKED | STREAM | {"background": True}, JobStatus.STREAMING),
    ("/v1/jobs/{id}/events", {}, JobStatus.STREAMING),
]


@pytest.mark.parametrize("has_spoken", [False, True], ids=["waiting", "speaking"])
async def test_a_revoked_key_ends_its_open_calls(
    gateways: Gateways,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    idle_worker: FakeWorker,
    has_spoken: bool,
) -> None:
    """Whole answers get 401, streams an error event. A job goes on if it would without its caller;
    the call of another key of the same tenant goes on in any case."""
    api_keys = ApiKeys(redis_client, keys)
    (mine, prefix), (other, _) = await bearer(api_keys), await bearer(api_keys)
    async with gateways(heartbeat_s=30) as http, asyncio.TaskGroup() as group:
        theirs = group.create_task(http.post("/v1/completions", json=BODY, headers=other))
        of_other = await idle_worker.claim()
        opened = []
        for path, body, status in CALLS:
            if "{id}" in path:
                job = {"endpoint": "/v1/completions", "body": BODY}
                made = await http.post("/v1/jobs", json=job, headers=mine)
                path = path.format(id=made.json()["id"])
            method = "POST" if body else "GET"
            asking = http.request(method, path, json=body or None, headers=mine)
            call = group.create_task(asking)
            claimed = await idle_worker.claim()
            if has_spoken:
                await idle_worker.say(claimed, 1, says("Hello")(claimed.job)[0])
            elif status is JobStatus.STREAMING:
                status = JobStatus.CLAIMED
            opened.append((call, body, claimed, status))

        await api_keys.revoke(prefix)
        async with asyncio.timeout(PROMISED_S):
            await asyncio.wait([call for call, *_ in opened])

        for call, body, claimed, status in opened:
            assert_ended(call.result(), is_stream=bool(body.get("stream")) or not body)
            await until(partial(has_status, idle_worker, claimed, status))
        assert not theirs.done()
        await idle_worker.run(of_other)
        assert (await theirs).status_code == 200


async def has_status(worker: FakeWorker, claimed: Claimed, status: JobStatus) -> bool:
    found = await worker.functions.read(claimed.job.id, "acme")
    return found is not None and found[0].status is status


def assert_ended(answer: httpx.Response, *, is_stream: bool) -> None:
    if answer.status_code == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"
    else:
        assert is_stream
        assert answer.status_code == 200
        assert '"code":"invalid_api_key"' in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")


async def test_an_expired_key_ends_its_open_call(
    gateways: Gateways, redis_client: redis.asyncio.Redis, keys: Keys, idle_worker: FakeWorker
) -> None:
    """As a revoked one."""
    mine, _ = await bearer(ApiKeys(redis_client, keys), lifetime_s=1.0)
    async with gateways() as http:
        answer = await http.post("/v1/completions", json=BODY | STREAM, headers=mine)
    assert_ended(answer, is_stream=True)


async def test_the_operator_s_key_and_none_are_not_watched(
    gateways: Gateways, idle_worker: FakeWorker
) -> None:
    """A key that looks like one of Redis's is none where no key exists yet."""
    unknown = {"authorization": f"Bearer bw-{'a' * 8}-{'0' * 64}"}
    async with gateways() as http:
        call = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=unknown))
        claimed = await idle_worker.claim()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(PROMISED_S):
                await asyncio.shield(call)
        await idle_worker.run(claimed)
        assert (await call).status_code == 200
