"""No message goes to a URL unsigned: what no secret signs is refused at every way in, and where the
delivering process lacks the secret, it waits for one and becomes a dead letter."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.api_keys import ApiKeys, KeyTerms
from contract.callbacks import Secrets
from contract.function_types import Append
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from contract.outbox import Outbox
from gateway.aws.intake import JobRefused
from infra.embedded_redis import EmbeddedRedis
from tests.aws.conftest import running_function
from tests.aws.lambda_events import event_bus_event, sns_event, sqs_event
from tests.callbacks.receiver import SECRET, Answer, Receiver, always
from tests.callbacks.test_delivery import OTHER_SECRET, dead_letter, ended_job, service, to_url
from tests.fleet import until
from tests.gateway.conftest import make_settings, openapi_document, running_gateway
from tests.gateway.fake_worker import LEASE_S, MODEL, FakeWorker

pytestmark = pytest.mark.anyio

QUICK = (0.05, 0.05)
URL = "https://receiver.example/hook"
CALL = {"model": MODEL, "prompt": "ab"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "ab"}]}
MALFORMED: tuple[str, ...] = (
    "",
    "whsec_",
    "hush",
    "whsec_!!!!",
    "whsec_QUJD",
    f"{SECRET}é",
    f"x{SECRET}",
)
# The secrets of a process by tenant, and messages that none of them signs: a tenant, and the
# callback's own secret.
Shared = dict[str, tuple[str, ...]]
MALFORMED_BY_TENANT = {f"t{number}": (secret,) for number, secret in enumerate(MALFORMED)}
UNSIGNED: list[tuple[Shared, list[tuple[str, str | None]]]] = [
    ({}, [("t", None)]),
    ({"other": (SECRET,)}, [("t", None), *(("other", own) for own in MALFORMED)]),
    (
        {"": (SECRET,), **MALFORMED_BY_TENANT},
        [("t", own) for own in MALFORMED] + [(tenant, None) for tenant in MALFORMED_BY_TENANT],
    ),
    ({"": (MALFORMED[1],)}, [("t", None)]),
]
JOBS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", CALL),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"model": MODEL, "input": "ab"}),
]


@pytest.mark.parametrize(("shared", "unsigned"), UNSIGNED)
async def test_what_no_secret_signs_is_not_sent(
    functions: Functions,
    outbox: Outbox,
    redis_server: EmbeddedRedis,
    shared: Shared,
    unsigned: list[tuple[str, str | None]],
) -> None:
    """After the last retry it is a dead letter with the reason; the receiver has heard nothing."""
    async with (
        Receiver({"/": always(Answer())}) as receiver,
        service(redis_server, secrets=Secrets(shared), retry_delays_s=QUICK),
    ):
        jobs = [
            await ended_job(functions, to_url(receiver.url("/"), secret=own), tenant=tenant)
            for tenant, own in unsigned
        ]
        letters = [await dead_letter(outbox, job) for job in jobs]
    assert (receiver.messages, receiver.forged) == ([], [])
    for letter in letters:
        assert letter.record.attempt == 1 + len(QUICK)
        assert letter.record.note.startswith("no secret signs it")
        assert "hush" not in letter.record.note


async def test_a_message_waits_for_a_secret_that_was_taken_away(
    functions: Functions, redis_server: EmbeddedRedis
) -> None:
    """It was tried with the old secret, waits without one, and goes out signed by the new one."""
    answers = iter([Answer(500), Answer()])

    async def has_waited() -> bool:
        return (await functions.snapshot("m", [])).deliveries.get("retry", 0) >= 3

    async with Receiver({"/": lambda _: next(answers)}) as receiver:
        async with service(redis_server, secrets=Secrets.parse(f"t={SECRET}")):
            await ended_job(functions, to_url(receiver.url("/"), secret=None))
            await receiver.until(lambda: len(receiver.messages) == 1)
        async with service(redis_server, secrets=Secrets.parse(f"other={OTHER_SECRET}")):
            await until(has_waited)
        assert (len(receiver.messages), receiver.forged) == (1, [])
        async with service(redis_server, secrets=Secrets.parse(f"t={OTHER_SECRET},{SECRET}")):
            await receiver.until(lambda: len(receiver.messages) == 2)
    first, second = receiver.messages
    assert (first.id, first.body) == (second.id, second.body)
    assert receiver.forged == []


async def test_a_dead_letter_is_delivered_once_there_is_a_secret(
    functions: Functions, outbox: Outbox, redis_server: EmbeddedRedis
) -> None:
    """By a replay, under the same id."""
    async with Receiver({"/": always(Answer())}) as receiver:
        async with service(redis_server, retry_delays_s=QUICK):
            job = await ended_job(functions, to_url(receiver.url("/"), secret=None))
            letter = await dead_letter(outbox, job)
        await outbox.replay(job.id, "t")
        async with service(redis_server, secrets=Secrets.parse(SECRET)):
            await receiver.until(lambda: bool(receiver.accepted()))
    assert list(receiver.accepted()) == [letter.record.message_id]


# --- every way in -----------------------------------------------------------------------------


def test_these_routes_take_a_callback() -> None:
    """A new one must be in the tests below."""
    document = openapi_document()
    schemas = document["components"]["schemas"]
    holders = {
        name for name, schema in schemas.items() if "callback" in schema.get("properties", {})
    }
    takers = {
        path
        for path, item in document["paths"].items()
        for operation in item.values()
        if any(f'/{name}"' in json.dumps(operation.get("requestBody")) for name in holders)
    }
    assert takers == {"/v1/jobs", "/v1/quote", "/v1/batches"}


def is_refused(answer: httpx.Response) -> bool:
    error = answer.json().get("error", {})
    return (answer.status_code, error.get("param")) == (400, "callback.secret")


async def test_a_gateway_refuses_what_nothing_signs(
    redis_server: EmbeddedRedis, tmp_path: Path, idle_worker: FakeWorker
) -> None:
    """Jobs, quotes and batches; nothing is stored."""
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": CALL}
    lines = {"file": ("lines.jsonl", json.dumps(line).encode())}
    with running_gateway(make_settings(redis_server.url, object_store=str(tmp_path))) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            answer = await http.post("/v1/files", data={"purpose": "batch"}, files=lines)
            batch = {
                "input_file_id": answer.json()["id"],
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            }
            for secret in (None, *MALFORMED):
                callback = {"url": URL} | ({} if secret is None else {"secret": secret})
                for endpoint, body in JOBS:
                    job = {"endpoint": endpoint, "body": body, "callback": callback}
                    assert is_refused(await http.post("/v1/jobs", json=job)), (endpoint, secret)
                    assert is_refused(await http.post("/v1/quote", json=job)), (endpoint, secret)
                answer = await http.post("/v1/batches", json={**batch, "callback": callback})
                assert is_refused(answer), secret
            assert (await http.get("/v1/jobs")).json()["data"] == []
            assert (await http.get("/v1/batches")).json()["data"] == []


async def test_a_gateway_signs_for_the_tenants_whose_secret_it_has(
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    idle_worker: FakeWorker,
) -> None:
    job = {"endpoint": "/v1/completions", "body": CALL, "callback": {"url": URL}}
    settings = make_settings(redis_server.url, callback_secrets=f"a={SECRET}")
    with running_gateway(settings) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            for tenant, status in (("a", 202), ("b", 400)):
                key, _ = await ApiKeys(redis_client, keys).create(KeyTerms(tenant=tenant))
                headers = {"authorization": f"Bearer {key}"}
                answer = await http.post("/v1/jobs", json=job, headers=headers)
                assert answer.status_code == status, answer.text


async def test_a_job_is_not_replayed_once_its_secret_is_gone(
    redis_server: EmbeddedRedis, functions: Functions, idle_worker: FakeWorker
) -> None:
    """Jobs with a secret of their own are; the operation counts the other as failed."""
    job: dict[str, Any] = {"endpoint": "/v1/completions", "body": CALL}
    with running_gateway(make_settings(redis_server.url, callback_secrets=SECRET)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            for callback in ({"url": URL}, {"url": URL, "secret": SECRET}):
                answer = await http.post("/v1/jobs", json=job | {"callback": callback})
                assert answer.status_code == 202, answer.text
                claimed = await idle_worker.claim()
                end = Append(claimed.job.id, claimed.epoch, 1, fin=JobStatus.FAILED, code="retries")
                await functions.append(idle_worker.incarnation, [end], lease_s=LEASE_S)
    with running_gateway(make_settings(redis_server.url)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            begun = (await http.post("/v1/jobs/replay", json={"lane": "standard"})).json()

            async def has_ended() -> bool:
                shown = (await http.get(f"/v1/operations/{begun['id']}")).json()
                begun.update(shown)
                return bool(shown["status"] == "completed")

            await until(has_ended)
    assert (begun["matched"], begun["done"], begun["failed"]) == (2, 1, 1)


async def test_an_event_whose_callback_nothing_signs_becomes_no_job(
    redis_server: EmbeddedRedis, functions: Functions, idle_worker: FakeWorker
) -> None:
    """Direct, of a bus, a topic or a queue: refused for good, with the field."""
    job = {"endpoint": "/v1/completions", "body": CALL, "callback": {"url": URL}}
    async with running_function(make_settings(redis_server.url, api_key="k" * 32)) as invoke:
        for event in (job, event_bus_event("1", job), sns_event("1", json.dumps(job))):
            with pytest.raises(JobRefused, match=r"callback\.secret"):
                await invoke(event)
        answer = await invoke(sqs_event(("1", json.dumps(job))))
    assert answer == {"batchItemFailures": [{"itemIdentifier": "1"}]}
    claimed = await functions.claim(
        idle_worker.incarnation, MODEL, ["standard"], lease_s=LEASE_S, max_jobs=9, max_tokens=10**6
    )
    assert claimed == []
