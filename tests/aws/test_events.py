"""Events of every kind become jobs, also after half an hour without Redis; those of which no job
can be made end in the dead letters with their reason. Counted, none is lost."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import redis.asyncio

from contract.connection import connect
from contract.functions import Functions
from contract.keys import Keys
from contract.library import ensure_library
from gateway.aws.intake import DEAD_LETTERS_VARIABLE, MAX_RECEIVES, JobRefused
from infra.embedded_redis import EmbeddedRedis
from tests.aws.conftest import Invoke, running_function
from tests.aws.deliveries import Context, Deliveries
from tests.aws.lambda_events import (
    KEY,
    event_bus_event,
    given_up,
    rest_event,
    s3_event,
    sns_event,
    sqs_event,
)
from tests.aws.template import of_type, statements, variables
from tests.gateway.conftest import make_settings
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model

pytestmark = pytest.mark.anyio

JOB = {"endpoint": "/v1/completions", "body": {"model": MODEL, "prompt": "ab"}}
NO_JOB = {"endpoint": "/v1/completions", "body": {"model": MODEL}}
BUCKET = "intake"
EACH = 12
MINUTE_S = 60.0
Letters = Callable[[], list[tuple[str, str]]]  # (text, reason) of each
Put = Callable[[str, bytes], dict[str, Any]]


@pytest.fixture
def dead_letters(aws_environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Letters]:
    """Reads the queue of dead letters."""
    sqs = boto3.client("sqs")
    url = sqs.create_queue(QueueName="dead")["QueueUrl"]
    monkeypatch.setenv(DEAD_LETTERS_VARIABLE, url)

    def read() -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        while messages := sqs.receive_message(
            QueueUrl=url, MaxNumberOfMessages=10, MessageAttributeNames=["All"]
        ).get("Messages"):
            for each in messages:
                found.append((each["Body"], each["MessageAttributes"]["reason"]["StringValue"]))
                sqs.delete_message(QueueUrl=url, ReceiptHandle=each["ReceiptHandle"])
        return found

    yield read
    sqs.delete_queue(QueueUrl=url)


@pytest.fixture
def put(aws_environ: dict[str, str]) -> Put:
    """Writes an object; returns the event that tells of it."""
    s3 = boto3.client("s3")
    where = {"LocationConstraint": aws_environ["AWS_REGION"]}
    if BUCKET not in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]:
        s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration=where)

    def write(key: str, content: bytes) -> dict[str, Any]:
        s3.put_object(Bucket=BUCKET, Key=key, Body=content)
        return s3_event(BUCKET, key, len(content))

    return write


@pytest.fixture
async def invoke(redis_server: EmbeddedRedis, dead_letters: Any) -> AsyncIterator[Invoke]:
    """ApiFunction with a queue of dead letters."""
    async with running_function(make_settings(redis_server.url, api_key=KEY)) as invoke:
        yield invoke


@pytest.fixture
def breakable_redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
async def own_redis(breakable_redis: EmbeddedRedis) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(breakable_redis.url, Keys("test"))
    await ensure_library(client)
    await publish_model(client, Keys("test"))
    await FakeWorker(Functions(client, Keys("test"))).beat()
    yield client
    await client.aclose()


async def num_queued(client: redis.asyncio.Redis) -> int:
    counters = await client.hgetall(Keys("test").of("counters", MODEL, "standard"))
    return int(counters.get(b"queued_jobs", 0))


@pytest.mark.campaign
async def test_no_event_is_lost_while_redis_is_away_for_half_an_hour(
    breakable_redis: EmbeddedRedis,
    own_redis: redis.asyncio.Redis,
    dead_letters: Letters,
    put: Put,
) -> None:
    """Five kinds that nobody waits for, with one of each that is no job; and the API's caller is
    told to come again. Every event is delivered twice, and makes one job."""
    text = json.dumps(JOB)
    async with running_function(make_settings(breakable_redis.url, api_key=KEY)) as invoke:
        await invoke(rest_event("GET", "/v1/models"))  # the environment is warm
        breakable_redis.kill()
        world = Deliveries(invoke)
        for number in range(EACH):
            for _ in range(2):
                world.message(f"m{number}", text)
                world.event(f"bus{number}", event_bus_event(f"b{number}", JOB))
                world.event(f"topic{number}", sns_event(f"s{number}", text))
                world.event(f"bucket{number}", put(f"in/ö {number}.json", text.encode()))
                world.event(f"direct{number}", JOB)
        bad = json.dumps(NO_JOB)
        world.message("bad", bad)
        world.event("bad1", event_bus_event("bad1", NO_JOB))
        world.event("bad2", sns_event("bad2", bad))
        world.event("bad3", put("in/bad.json", bad.encode()))
        world.event("bad4", NO_JOB)
        await world.run(30 * MINUTE_S)
        told = await invoke(rest_event("POST", "/v1/jobs", JOB))
        assert (told["statusCode"], "retry-after" in told["headers"]) == (503, True)

        breakable_redis.start()
        await world.run(90 * MINUTE_S)

    assert (world.num_waiting, world.moved) == (0, [])
    assert await num_queued(own_redis) == 5 * EACH
    dead = dead_letters()
    assert len(dead) == 5
    for _, reason in dead:
        assert reason == "400 missing_required_parameter: body.prompt: missing parameter"


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"Records": [{"eventSource": "aws:kinesis", "kinesis": {}}]}, "none of SQS, SNS, S3"),
        ({"Records": [{"EventSource": "aws:sns", "Sns": {}}]}, "KeyError('Message')"),
        ({"Records": 7}, "TypeError"),
        ({"detail-type": "a", "id": "1", "detail": "text"}, "TypeError"),
        (s3_event(BUCKET, "gone.json", 9), "not there any more"),
        (s3_event(BUCKET, "big.json", 10**9), "more than 4194304 bytes"),
        (s3_event(BUCKET, "a.json", 9) | {"Event": "other"}, "not there any more"),
        ({}, "endpoint: missing parameter"),
    ],
    ids=["stream", "sns", "records", "detail", "gone", "big", "name", "empty"],
)
async def test_an_event_of_no_known_form_ends_in_the_dead_letters(
    event: dict[str, Any],
    reason: str,
    invoke: Invoke,
    idle_worker: FakeWorker,
    dead_letters: Letters,
    put: Put,
) -> None:
    """It fails in every asynchronous attempt, and as a message is written down with its reason."""
    with pytest.raises(JobRefused) as failed:
        await invoke(event, Context("1"))
    assert reason in str(failed.value)

    world = Deliveries(invoke)
    world.event("1", event)
    await world.run(60 * MINUTE_S)
    [(text, written)] = dead_letters()
    assert (world.num_waiting, world.num_invocations) == (0, 4)
    assert json.loads(text)["requestPayload"] == event
    assert reason in written


async def test_events_within_events_are_read(
    invoke: Invoke,
    idle_worker: FakeWorker,
    redis_client: redis.asyncio.Redis,
    put: Put,
) -> None:
    """S3 over SNS over SQS, EventBridge over SQS, and what Lambda gave up; each time the same job.
    What S3 sends when notifications are set up is nothing."""
    text, created = json.dumps(JOB), put("a.json", json.dumps(JOB).encode())
    over_sns = sns_event("1", json.dumps(created))
    for _ in range(2):
        await invoke(sqs_event(("1", json.dumps(over_sns["Records"][0]["Sns"]))))
        await invoke(over_sns, Context("7"))
        await invoke(sqs_event(("2", json.dumps(given_up(created, "3")))))
        assert await num_queued(redis_client) == 1
    for _ in range(2):
        await invoke(sqs_event(("3", json.dumps(event_bus_event("a", JOB)))))
        await invoke(event_bus_event("a", JOB))
        assert await num_queued(redis_client) == 2
    await invoke(sns_event("4", text, **{"Idempotency-Key": "own"}), Context("8"))
    await invoke(JOB | {"headers": {"idempotency-key": "own"}}, Context("9"))
    assert await num_queued(redis_client) == 3
    test = {"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": BUCKET}
    assert await invoke(sqs_event(("5", json.dumps(test)))) == {"batchItemFailures": []}
    assert await num_queued(redis_client) == 3


async def test_a_message_that_is_refused_for_hours_ends_with_its_last_reason(
    invoke: Invoke, idle_worker: FakeWorker, dead_letters: Letters
) -> None:
    """A model that does not come: before SQS itself would move the message, without a reason."""
    text = json.dumps({"endpoint": "/v1/completions", "body": {"model": "none", "prompt": "a"}})
    world = Deliveries(invoke)
    world.message("1", text)
    await world.run(24 * 60 * MINUTE_S)
    assert (world.num_invocations, world.moved) == (MAX_RECEIVES, [])
    [(found, reason)] = dead_letters()
    assert found == text
    assert reason.startswith("404 model_not_found: ")


async def test_an_object_of_the_store_is_no_job(
    redis_server: Any,
    idle_worker: FakeWorker,
    put: Put,
    dead_letters: Letters,
) -> None:
    """Whoever may send events may not read all tenants' prompts and files by them."""
    settings = make_settings(redis_server.url, api_key=KEY, object_store=f"s3://{BUCKET}/jobs")
    async with running_function(settings) as own:
        event = put("jobs/a/content", json.dumps(JOB).encode())
        assert await own(sqs_event(("1", json.dumps(event)))) == {"batchItemFailures": []}
    [(_, reason)] = dead_letters()
    assert "an object of the gateway's own store" in reason


async def test_a_message_whose_dead_letter_fails_stays_in_the_queue(
    invoke: Invoke, idle_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, redis_server: Any
) -> None:
    """SQS then moves it by itself."""
    monkeypatch.setenv(DEAD_LETTERS_VARIABLE, "http://127.0.0.1:1/none")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    async with running_function(make_settings(redis_server.url, api_key=KEY)) as lonely:
        answer = await lonely(sqs_event(("1", "{")))
    assert answer == {"batchItemFailures": [{"itemIdentifier": "1"}]}


def test_the_template_keeps_events_for_longer_than_an_outage() -> None:
    """The function gives a message up before the queue does, and after hours; Lambda hands what it
    gives up to the queue, which the function's role may write."""
    queue = of_type("AWS::SQS::Queue")["IntakeQueue"]
    receives = queue["RedrivePolicy"]["maxReceiveCount"]
    assert receives > MAX_RECEIVES
    assert 4 * 3_600 < MAX_RECEIVES * queue["VisibilityTimeout"] < queue["MessageRetentionPeriod"]
    [asynchronous] = of_type("AWS::Lambda::EventInvokeConfig").values()
    # What Lambda's own faults may take.
    assert asynchronous["MaximumEventAgeInSeconds"] == 6 * 3_600
    assert asynchronous["Qualifier"] == "live"
    alarms = of_type("AWS::CloudWatch::Alarm").values()
    assert {"DestinationDeliveryFailures", "ApproximateNumberOfMessagesVisible"} <= {
        alarm.get("MetricName") for alarm in alarms
    }
    dead_letters = variables("ApiFunction")[DEAD_LETTERS_VARIABLE]
    assert dead_letters == {"Ref": "IntakeDeadLetters"}
    [sends] = [
        one["Resource"]
        for role, one in statements()
        if role == "ApiRole" and one.get("Action") == "sqs:SendMessage"
    ]
    assert sends == [{"Fn::GetAtt": [name, "Arn"]} for name in ("IntakeQueue", "IntakeDeadLetters")]
