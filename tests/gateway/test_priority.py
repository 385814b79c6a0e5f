"""`priority`, by which a tenant's jobs of a lane go."""

from typing import Any

import httpx
import pytest

from tests.gateway.conftest import error_of
from tests.gateway.fake_worker import MODEL, FakeWorker
from tests.gateway.test_vector_jobs import EMBED, plain  # noqa: F401

pytestmark = pytest.mark.anyio

HI: Any = [{"role": "user", "content": "Hi"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "ab"},
    "/v1/responses": {"input": "ab", "background": True},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
}
PATHS = [*CALLS, *("/v1/jobs of " + path for path in CALLS if path != "/v1/messages")]


async def called(http: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    jobs, _, inner = path.rpartition(" of ")
    body = {"model": MODEL, **CALLS[inner], **fields}
    if jobs:
        return await http.post(jobs, json={"endpoint": inner, "body": body})
    return await http.post(path, json=body, headers={"prefer": "respond-async"})


@pytest.mark.parametrize("path", PATHS)
async def test_the_lower_priority_goes_first(
    http: httpx.AsyncClient, idle_worker: FakeWorker, path: str
) -> None:
    """Of every kind of call; none and null are 0."""
    ids = []
    for priority in (7, None, -524_288, 0, 524_287, -1):
        answer = await called(http, path, priority=priority)
        assert answer.is_success, answer.text
        assert "x-ignored-parameters" not in answer.headers
        ids.append(answer.json()["id"].removeprefix("resp_").removeprefix("job-"))
    claimed = [(await idle_worker.claim()).job.id.removeprefix("job-") for _ in ids]
    assert claimed == [ids[number] for number in (2, 5, 1, 3, 0, 4)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("priority", [524_288, -524_289, 2**70, 0.5, "1", True])
async def test_a_priority_that_no_queue_can_hold_is_refused(
    http: httpx.AsyncClient, idle_worker: FakeWorker, path: str, priority: Any
) -> None:
    answer = await called(http, path, priority=priority)
    assert answer.status_code == 400
    name = "body.priority" if " of " in path else "priority"
    assert answer.json()["error"]["param"] == name
    if path != "/v1/messages":
        assert error_of(answer) == (400, name, "invalid_value")


async def test_a_call_for_vectors_has_one(http: httpx.AsyncClient, plain: FakeWorker) -> None:  # noqa: F811
    asked: Any = EMBED
    asked = {**asked, "body": {**asked["body"], "priority": -5}}
    answer = await http.post("/v1/jobs", json=asked)
    job_id = answer.json()["id"]
    assert await plain.client.hget(plain.keys.of("job", job_id), "priority") == b"-5"
