"""Callbacks over HTTP: validation, progress and dead letters."""

from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.api_keys import ApiKeys, KeyTerms
from contract.functions import Functions
from contract.keys import Keys
from contract.outbox import Outbox, callback_state
from infra.embedded_redis import EmbeddedRedis
from tests.callbacks.receiver import Answer, Receiver, always
from tests.callbacks.test_delivery import dead_letter as dead_letter_of
from tests.callbacks.test_delivery import service, to_url
from tests.clock import TEST_CLOCK
from tests.contract.some_calls import dead_letter, make_job, make_submission
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = pytest.mark.anyio

URL = "https://receiver.example/hook?token=hush"
SECRET = "whsec_" + "A" * 32
BODY = {"model": MODEL, "prompt": "ab", "max_tokens": 4}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"url": "http://example.com/"}, "url", "invalid_value"),
    ({"url": "https://10.0.0.1/"}, "url", "invalid_value"),
    ({"url": "https://u:p@example.com/"}, "url", "invalid_value"),
    ({"url": "http\u017f://a.b/", "secret": SECRET}, "url", "invalid_value"),
    ({"url": "https://a\u212a.example/", "secret": SECRET}, "url", "invalid_value"),
    ({"url": URL}, "secret", "missing_required_parameter"),
    ({"url": URL, "secret": "hush"}, "secret", "invalid_value"),
    ({"sqs": "https://sqs.example/q"}, "sqs", "invalid_value"),
    ({"lambda": "f", "x": 1}, "x", "unknown_parameter"),
    ({"url": URL, "secret": SECRET, "progress_tokens": 5}, "progress_tokens", "invalid_value"),
    ({"url": URL, "secret": SECRET, "progress_tokens": 0}, "progress_tokens", "invalid_value"),
    ({"url": URL, "secret": SECRET, "events": ["job.done"]}, "events.0", "invalid_value"),
    ({"url": URL, "secret": SECRET, "payload": "fat"}, "payload", "invalid_value"),
]


async def submit(http: httpx.AsyncClient, callback: object) -> httpx.Response:
    job = {"endpoint": "/v1/completions", "body": BODY, "callback": callback}
    return await http.post("/v1/jobs", json=job)


@pytest.mark.parametrize(("callback", "param", "code"), REFUSED)
async def test_an_invalid_callback_is_rejected_by_field(
    http: httpx.AsyncClient,
    idle_worker: FakeWorker,
    callback: dict[str, Any],
    param: str,
    code: str,
) -> None:
    """400 at submission, without the URL or the secret in the response."""
    answer = await submit(http, callback)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (f"callback.{param}", code)
    assert "hush" not in answer.text


async def test_exactly_one_target_is_needed(
    http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """The error for none or two names the field."""
    for callback in ({}, {"url": URL, "s3": "bucket"}):
        answer = await submit(http, callback)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "callback")


async def test_no_response_contains_the_callback(
    http: httpx.AsyncClient, idle_worker: FakeWorker, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """It is stored with the job only."""
    answer = await submit(http, {"url": URL, "secret": SECRET, "payload": "full"})
    assert answer.status_code == 202, answer.text
    job_id = answer.json()["id"]
    shown = await http.get(f"/v1/jobs/{job_id}")
    assert SECRET not in answer.text + shown.text
    assert "hush" not in answer.text + shown.text
    assert await redis_client.hexists(keys.of("job", job_id), "callback")


async def test_dead_letters_are_listed_shown_and_replayed(
    http: httpx.AsyncClient, functions: Functions, outbox: Outbox
) -> None:
    """For their own tenant only, without the URL. A replay makes the message due again."""
    await dead_letter(functions, outbox, tenant="default")
    foreign = f"/v1/callbacks/dead/{await dead_letter(functions, outbox, tenant='other')}"

    listed = await http.get("/v1/callbacks/dead")
    [letter] = listed.json()["data"]
    assert (letter["type"], letter["last_error"]) == ("job.cancelled", "HTTP 410")
    path = f"/v1/callbacks/dead/{letter['id']}"
    assert (await http.get(path)).json() == letter
    assert (await http.get(foreign)).status_code == 404
    assert (await http.post(f"{foreign}/replay")).status_code == 404
    replayed = await http.post(f"{path}/replay")
    assert (replayed.status_code, replayed.json()["state"]) == (202, "due")
    assert (await http.get("/v1/callbacks/dead")).json()["data"] == []
    [again] = await outbox.take(lease_s=5, max_messages=9, max_per_target=9)
    record = await outbox.start(again, lease_s=5)
    assert record is not None
    assert record.message_id == letter["message_id"]
    assert "hush" not in listed.text


async def test_a_key_replays_no_callback_of_another_lane(
    gateway_url: str,
    functions: Functions,
    outbox: Outbox,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
) -> None:
    """403, and the letter stays dead. The key replays one of its own lane."""
    dead = "/v1/callbacks/dead"
    other = await dead_letter(functions, outbox, tenant="acme")
    own = await dead_letter(functions, outbox, tenant="acme", lane="batch")
    key, _ = await ApiKeys(redis_client, keys).create(KeyTerms(tenant="acme", lanes=("batch",)))
    headers = {"authorization": f"Bearer {key}"}

    async with httpx.AsyncClient(base_url=gateway_url, headers=headers) as client:
        refused = await client.post(f"{dead}/{other}/replay")
        replayed = await client.post(f"{dead}/{own}/replay")

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "lane_not_allowed")
    assert replayed.status_code == 202
    assert [letter.record.job_id for letter in await outbox.dead("acme")] == [other]


async def test_a_job_shows_the_state_of_its_callback(
    http: httpx.AsyncClient,
    idle_worker: FakeWorker,
    outbox: Outbox,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
) -> None:
    """Pending before the end, between attempts and during one, then delivered. Only the job's
    tenant sees it, without the target."""
    path = f"/v1/jobs/{(await submit(http, {'url': URL, 'secret': SECRET})).json()['id']}"
    job_id = path.rpartition("/")[2]

    async def shown() -> Any:
        answer = await http.get(path)
        assert "hush" not in answer.text
        return answer.json()["callback"]

    assert await shown() == {"state": "pending", "attempts": 0, "next_attempt_at": None}
    await http.post(f"{path}/cancel")
    ended = await shown()
    assert (ended["state"], ended["attempts"]) == ("pending", 0)
    [taken] = await outbox.take(lease_s=5, max_messages=1, max_per_target=1)
    await outbox.start(taken, lease_s=5)
    assert await shown() == {"state": "pending", "attempts": 1, "next_attempt_at": None}
    await outbox.done(taken, "retry", delay_s=60)
    later = await shown()
    assert later["attempts"] == 1
    assert later["next_attempt_at"] == pytest.approx(ended["next_attempt_at"] + 60, abs=30)
    assert await callback_state(redis_client, keys, job_id, "a stranger") is None
    await redis_client.incrby(TEST_CLOCK, 60_000)
    [taken] = await outbox.take(lease_s=5, max_messages=1, max_per_target=1)
    await outbox.start(taken, lease_s=5)
    await outbox.done(taken, "delivered")
    assert await shown() == {"state": "delivered", "attempts": 2, "next_attempt_at": None}


async def test_a_job_shows_that_its_callback_was_given_up(
    http: httpx.AsyncClient, functions: Functions, redis_server: EmbeddedRedis, outbox: Outbox
) -> None:
    """After 410, and after the last retry. After a replay it is pending again."""
    behaviours = {"/gone": always(Answer(410)), "/bad": always(Answer(500))}
    attempts = {"/gone": 1, "/bad": 3}
    async with Receiver(behaviours) as receiver, service(redis_server, retry_delays_s=(0.05, 0.05)):
        for path, num_attempts in attempts.items():
            job = make_job("default")
            callback = to_url(receiver.url(path))
            await functions.submit(job, make_submission(callback=callback))
            await functions.cancel(job.id, "default")
            await dead_letter_of(outbox, job)
            shown = (await http.get(f"/v1/jobs/{job.id}")).json()["callback"]
            expected = {"state": "given_up", "attempts": num_attempts, "next_attempt_at": None}
            assert shown == expected
    await http.post(f"/v1/callbacks/dead/{job.id}/replay")
    shown = (await http.get(f"/v1/jobs/{job.id}")).json()["callback"]
    assert shown["state"] == "pending"


async def test_a_job_without_a_callback_shows_null(
    http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    answer = await http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": BODY})
    shown = (await http.get(f"/v1/jobs/{answer.json()['id']}")).json()
    assert shown["callback"] is None
