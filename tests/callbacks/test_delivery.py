"""Deliveries from the end of a job to the receiver's response, and what each response causes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from msgspec.structs import replace
from redis.backoff import NoBackoff
from redis.retry import Retry
from standardwebhooks import Webhook

from contract.callbacks import Callback, CallbackKind, Secrets
from contract.connection import broker_errors
from contract.errors import BrokerUnavailable
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append
from contract.functions import Functions
from contract.jobs import FinishReason, Job, JobStatus
from contract.keys import Keys, in_partition, partition_of
from contract.outbox import DeadLetter, Outbox, Taken
from contract.partitions import made_number
from infra.embedded_redis import EmbeddedRedis
from tests.callbacks.callbacks_process import quick_settings
from tests.callbacks.receiver import SECRET, Answer, Receiver, always
from tests.chaos.proxy import Link
from tests.contract.some_calls import claim, make_job, make_submission
from tests.fleet import until
from workers.callbacks.rq_runner import AttemptQueue
from workers.callbacks.service import CallbackService
from workers.callbacks.webhook import WebhookSender

pytestmark = pytest.mark.anyio

OTHER_SECRET = "whsec_" + "QUJD" * 8


@asynccontextmanager
async def service(redis_server: EmbeddedRedis, **settings: Any) -> AsyncIterator[None]:
    """A relay and an RQ worker in this process, stopped at exit."""
    stopping = asyncio.Event()
    running = asyncio.create_task(
        CallbackService(quick_settings(redis_server.url, **settings)).run(stopping)
    )
    try:
        yield
    finally:
        stopping.set()
        await running


def to_url(url: str, **options: Any) -> Callback:
    fields: dict[str, Any] = {"secret": SECRET, **options}
    return Callback(kind=CallbackKind.URL, target=url, **fields)


async def ended_job(
    functions: Functions,
    callback: Callback,
    text: str = "said",
    *,
    tenant: str = "t",
    partition: int = 0,
) -> Job:
    """A job that ran on a worker and succeeded with one token."""
    job = make_job(tenant)
    job = replace(job, id=in_partition(job.id, partition))
    await functions.submit(job, make_submission(callback=callback))
    [claimed] = await claim(functions)
    delta = ChoiceDelta(0, 0, (7,), text, FinishReason.STOP)
    item = Append(job.id, claimed.epoch, 1, Tokens((delta,), 2), 1, JobStatus.SUCCEEDED)
    await functions.append("w1", [item], lease_s=10)
    return job


async def dead_letter(outbox: Outbox, job: Job) -> DeadLetter:
    """Waits for the job's dead letter."""
    async with asyncio.timeout(30):
        while not (found := await outbox.dead(job.tenant, job_id=job.id)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # another process sets no event
    return found[0]


async def test_a_callback_is_signed_and_thin(
    functions: Functions, redis_server: EmbeddedRedis
) -> None:
    """It has status, usage and the result's URL, but no output. The standard library for
    webhooks verifies its signature."""
    async with Receiver({"/": always(Answer())}) as receiver, service(redis_server):
        job = await ended_job(functions, to_url(receiver.url("/?token=x")))
        await receiver.until(lambda: len(receiver.messages) == 1)
    [message] = receiver.messages
    assert receiver.forged == []
    assert message.id == f"{job.id}-1"
    assert message.body["type"] == "job.succeeded"
    data = message.body["data"]
    assert (data["id"], data["status"], data["error"]) == (job.id, "succeeded", None)
    assert data["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert data["result_url"] == f"/v1/jobs/{job.id}"
    assert "said" not in json.dumps(message.body)


async def test_messages_of_all_partitions_are_delivered(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis
) -> None:
    """By one process, which began before the namespace was made."""
    async with Receiver({"/": always(Answer())}) as receiver, service(redis_server):
        await made_number(redis_client, Keys("test"), 3)
        for number in range(3):
            functions = Functions(redis_client, Keys("test", number))
            await ended_job(functions, to_url(receiver.url("/")), partition=number)
        await receiver.until(lambda: len(receiver.messages) == 3)
    assert {partition_of(message.body["data"]["id"]) for message in receiver.messages} == {0, 1, 2}


async def test_a_full_message_contains_the_output(
    functions: Functions, redis_server: EmbeddedRedis
) -> None:
    """If requested: each choice as the job's result has it."""
    public_url = "https://models.example"
    async with (
        Receiver({"/": always(Answer())}) as receiver,
        service(redis_server, public_url=public_url),
    ):
        await ended_job(functions, to_url(receiver.url("/"), is_full=True), text="ünder")
        await receiver.until(lambda: len(receiver.messages) == 1)
    data = receiver.messages[0].body["data"]
    choice = {"index": 0, "text": "ünder", "logprobs": None, "finish_reason": "stop"}
    assert data["choices"] == [choice]
    assert data["result_url"].startswith(f"{public_url}/v1/jobs/")


async def test_failures_are_tried_again_under_the_same_id(
    functions: Functions, redis_server: EmbeddedRedis
) -> None:
    """Errors, a redirect (which is not followed), a broken connection, then success. Metrics
    count each attempt by outcome."""
    redirect = Answer(307, headers={"location": "/elsewhere"})
    answers = iter([Answer(500), redirect, Answer(0), Answer(404), Answer()])
    async with (
        Receiver({"/": lambda _: next(answers), "/elsewhere": always(Answer())}) as receiver,
        service(redis_server),
    ):
        await ended_job(functions, to_url(receiver.url("/")))
        await receiver.until(lambda: bool(receiver.accepted()))
    assert len({message.id for message in receiver.messages}) == 1
    assert [message.was_accepted for message in receiver.messages] == [False] * 4 + [True]
    deliveries = (await functions.snapshot("m", [])).deliveries
    assert deliveries == {"retry": 4, "delivered": 1}
    assert len({json.dumps(message.body) for message in receiver.messages}) == 1


async def test_410_and_the_last_retry_make_dead_letters(
    functions: Functions, outbox: Outbox, redis_server: EmbeddedRedis
) -> None:
    """410 at once, other failures after the last retry. A replay starts over and is delivered."""
    behaviours = {"/gone": always(Answer(410)), "/bad": always(Answer(500))}
    async with Receiver(behaviours) as receiver, service(redis_server, retry_delays_s=(0.05, 0.05)):
        gone = await ended_job(functions, to_url(receiver.url("/gone")))
        letter = await dead_letter(outbox, gone)
        assert letter.record.attempt == 1
        assert letter.record.note.startswith("HTTP 410")
        bad = await ended_job(functions, to_url(receiver.url("/bad")))
        letter = await dead_letter(outbox, bad)
        assert letter.record.attempt == 3
        receiver.behaviours["/bad"] = always(Answer())
        await outbox.replay(bad.id, "t")
        await receiver.until(lambda: bool(receiver.accepted()))
    assert list(receiver.accepted()) == [letter.record.message_id]


async def test_a_blocked_address_is_a_dead_letter_at_once(
    functions: Functions, outbox: Outbox, redis_server: EmbeddedRedis
) -> None:
    """Nothing is sent. The note has the reason without the address."""
    async with service(redis_server):
        job = await ended_job(functions, to_url("https://10.0.0.1/hook?token=hush"))
        letter = await dead_letter(outbox, job)
    assert "not public" in letter.record.note
    assert "10.0" not in letter.record.note


async def test_a_slow_receiver_delays_no_other(
    functions: Functions, redis_server: EmbeddedRedis
) -> None:
    """Although more messages than threads wait for it."""
    async with (
        Receiver({"/": always(Answer(delay_s=30))}) as slow,
        Receiver({"/": always(Answer())}) as quick,
        service(redis_server, max_concurrent=4, max_per_target=2, timeout_s=5.0),
    ):
        for _ in range(8):
            await ended_job(functions, to_url(slow.url("/")))
        await slow.until(lambda: len(slow.messages) == 2)
        for _ in range(8):
            await ended_job(functions, to_url(quick.url("/")))
        await quick.until(lambda: len(quick.accepted()) == 8)
        assert len(slow.messages) == 2, "max_per_target deliveries at a time"


async def test_any_exception_of_an_attempt_leads_to_a_retry(
    functions: Functions,
    outbox: Outbox,
    redis_server: EmbeddedRedis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one of a library. After the last retry the message is a dead letter."""

    async def fail(*_: object) -> None:
        raise RecursionError("hush")

    monkeypatch.setattr(WebhookSender, "_post", fail)
    async with service(redis_server, retry_delays_s=(0.05, 0.05)):
        job = await ended_job(functions, to_url("https://receiver.example/"))
        letter = await dead_letter(outbox, job)
    assert letter.record.attempt == 3
    assert letter.record.note == "it could not be sent (RecursionError)"


@pytest.mark.parametrize("num_jobs", [20, pytest.param(200, marks=pytest.mark.campaign)])
async def test_a_flood_of_invalid_urls_delays_no_other(
    functions: Functions, outbox: Outbox, redis_server: EmbeddedRedis, num_jobs: int
) -> None:
    """Each is a dead letter after one attempt. A gateway of an earlier version may have accepted
    them."""
    callback = to_url("https://receiver.example/\u212a")
    for _ in range(num_jobs):
        job = make_job("flood")
        await functions.submit(job, make_submission(callback=callback))
        await functions.cancel(job.id, "flood")
    async with Receiver({"/": always(Answer())}) as receiver, service(redis_server):
        await ended_job(functions, to_url(receiver.url("/")))
        await receiver.until(lambda: len(receiver.accepted()) == 1)

        async def all_dead() -> bool:
            return len(await outbox.dead("flood", limit=num_jobs)) == num_jobs

        await until(all_dead)
    assert {letter.record.attempt for letter in await outbox.dead("flood", limit=num_jobs)} == {1}
    deliveries = (await functions.snapshot("m", [])).deliveries
    assert deliveries == {"dead": num_jobs, "delivered": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "x"), ("at", "x"), ("callback", "\xff"), ("tenant", None), ("to", "elsewhere")],
)
async def test_an_unreadable_record_delays_no_other(
    functions: Functions,
    redis_client: redis.asyncio.Redis,
    redis_server: EmbeddedRedis,
    keys: Keys,
    field: str,
    value: str | None,
) -> None:
    """For each unreadable field: the message is lost and counted; the next one is delivered."""
    async with Receiver({"/": always(Answer())}) as receiver:
        damaged = await ended_job(functions, to_url(receiver.url("/")))
        key = keys.of("out", damaged.id)
        if value is None:
            await redis_client.hdel(key, field)
        else:
            await redis_client.hset(key, field, value)
        sound = await ended_job(functions, to_url(receiver.url("/")))
        async with service(redis_server):
            await receiver.until(lambda: len(receiver.messages) == 1)

            async def is_counted() -> bool:
                deliveries = (await functions.snapshot("m", [])).deliveries
                return deliveries == {"dead": 1, "delivered": 1}

            await until(is_counted)
    assert receiver.messages[0].body["data"]["id"] == sound.id


async def test_progress_callbacks_precede_the_final_one(
    functions: Functions, redis_server: EmbeddedRedis
) -> None:
    """Start, progress and end have a message each, in this order."""
    async with Receiver({"/": always(Answer())}) as receiver, service(redis_server):
        callback = to_url(receiver.url("/"), notifies_start=True, progress_tokens=2)
        job = make_job()
        await functions.submit(job, make_submission(callback=callback))
        [claimed] = await claim(functions)
        await receiver.until(lambda: len(receiver.messages) == 1)
        for number in (1, 2):
            ids = (7, 8)
            delta = ChoiceDelta(0, 2 * (number - 1), ids, "xx")
            fin = JobStatus.SUCCEEDED if number == 2 else ""
            item = Append(job.id, claimed.epoch, number, Tokens((delta,)), 2, fin)  # type: ignore[arg-type]
            await functions.append("w1", [item], lease_s=10)
            await receiver.until(lambda n=number: len(receiver.messages) == 1 + n)  # type: ignore[misc]
    delivered = [(message.body["type"], message.id) for message in receiver.messages]
    assert delivered == [
        ("job.started", f"{job.id}-1"),
        ("job.progress", f"{job.id}-2"),
        ("job.succeeded", f"{job.id}-3"),
    ]
    assert receiver.messages[1].body["data"]["usage"]["completion_tokens"] == 2


async def test_secrets_of_the_installation_sign_and_rotate(
    functions: Functions, redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis
) -> None:
    """One signature for each secret, so that receivers with the old or the new one can verify."""
    secrets = Secrets.parse(f"{OTHER_SECRET} t={OTHER_SECRET},{SECRET}")
    assert SECRET not in repr(secrets)
    async with (
        Receiver({"/": always(Answer())}) as receiver,
        service(redis_server, secrets=secrets),
    ):
        await ended_job(functions, to_url(receiver.url("/"), secret=None))
        await receiver.until(lambda: len(receiver.messages) == 1)
    headers = dict(receiver.messages[0].headers)
    assert len(headers["webhook-signature"].split()) == 2
    raw = json.dumps(receiver.messages[0].body, ensure_ascii=False, separators=(",", ":"))
    Webhook(OTHER_SECRET).verify(raw, headers)


def test_errors_do_not_quote_malformed_secrets() -> None:
    for text in ("whsec_hush", "t=hush", "whsec_" + "A" * 30, f"{SECRET},hush"):
        with pytest.raises(ValueError, match="a secret") as caught:
            Secrets.parse(text)
        assert "hush" not in str(caught.value)


class LosesOne(Link):
    """Loses the reply of this number, and its connection with it."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(lambda: Path(url.removeprefix("unix://")))
        self.num_left = number

    async def before_reply(self, command: bytes, reply: bytes) -> None:
        self.num_left -= 1
        if self.num_left == 0:
            raise ConnectionResetError


@pytest.mark.parametrize("number", range(1, 8))
async def test_a_connection_lost_at_any_command_leaves_an_attempt_to_be_repeated(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, number: int
) -> None:
    """redis-py has an error of its own for a connection that is lost in a transaction; a relay
    must outlive it, too."""
    link = LosesOne(redis_server.url, number)
    await link.start()
    client = redis.Redis.from_url(link.url, protocol=2, retry=Retry(NoBackoff(), 0))
    attempts = AttemptQueue(client, "test", "a key")
    taken = [Taken("job-0-" + "0" * 32, 1)]
    with suppress(BrokerUnavailable), broker_errors(client, "a command of RQ's queue"):
        await asyncio.to_thread(attempts.put, taken)
    has_lost = link.num_left <= 0
    await asyncio.to_thread(attempts.put, taken)
    assert await asyncio.to_thread(attempts.num_waiting) == 1
    client.close()
    await link.close()
    assert has_lost or number > 4
