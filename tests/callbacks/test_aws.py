"""Destinations in AWS, on moto's server: the same body and id as for a URL."""

import json
from collections.abc import Iterator
from typing import Any

import boto3
import httpx
import pytest

from contract.callbacks import Callback, CallbackKind, is_open_target
from tests.payloads.bucket import CREDENTIALS, running_s3
from workers.callbacks.destinations import AwsSender
from workers.callbacks.retries import Delivered, DeliveryFailed, DeliveryRefused

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of moto and botocore themselves
]

BODY = b'{"type":"job.succeeded","data":{"id":"job-0-1"}}'
HEADERS = {"webhook-id": "job-0-1-1", "webhook-timestamp": "1767225600"}


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    with running_s3() as url:  # and all other services
        config = {"lambda": {"use_docker": False}}  # functions answer without Docker
        httpx.post(f"{url}/moto-api/config", json=config).raise_for_status()
        yield url


@pytest.fixture
def aws(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> AwsSender:
    """A sender that finds moto's server in the environment."""
    for name, value in {"AWS_ENDPOINT_URL": moto_url, **CREDENTIALS}.items():
        monkeypatch.setenv(name, value)
    return AwsSender(timeout_s=10.0)


async def send(aws: AwsSender, kind: CallbackKind, target: str) -> object:
    callback = Callback(kind=kind, target=target)
    return await aws.send(callback, "job.succeeded", BODY, HEADERS)


def received(queue: str) -> list[dict[str, Any]]:
    client: Any = boto3.client("sqs")
    found = client.receive_message(
        QueueUrl=queue, MessageAttributeNames=["All"], MaxNumberOfMessages=10
    )
    messages: list[dict[str, Any]] = found.get("Messages", [])
    return messages


@pytest.mark.parametrize("fifo", [False, True])
async def test_a_queue_gets_body_and_headers(aws: AwsSender, fifo: bool) -> None:
    """Headers are attributes. A FIFO queue drops a second message with the same id."""
    client: Any = boto3.client("sqs")
    attributes = {"FifoQueue": "true"} if fifo else {}
    name = "ends.fifo" if fifo else "ends"
    queue = client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
    for _ in range(2):
        assert isinstance(await send(aws, CallbackKind.SQS, queue), Delivered)
    messages = received(queue)
    assert len(messages) == (1 if fifo else 2)
    assert messages[0]["Body"].encode() == BODY
    assert messages[0]["MessageAttributes"]["webhook-id"]["StringValue"] == "job-0-1-1"


async def test_a_topic_and_a_bus_forward_the_message(aws: AwsSender) -> None:
    """To a queue behind each of them."""
    sqs: Any = boto3.client("sqs")
    queue = sqs.create_queue(QueueName="behind")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"][
        "QueueArn"
    ]
    sns: Any = boto3.client("sns")
    topic = sns.create_topic(Name="ends")["TopicArn"]
    sns.subscribe(
        TopicArn=topic, Protocol="sqs", Endpoint=arn, Attributes={"RawMessageDelivery": "true"}
    )
    assert isinstance(await send(aws, CallbackKind.SNS, topic), Delivered)
    [message] = received(queue)
    assert message["Body"].encode() == BODY

    events: Any = boto3.client("events")
    events.create_event_bus(Name="ends")
    pattern = json.dumps({"source": ["batchway"], "detail-type": ["job.succeeded"]})
    events.put_rule(Name="all", EventBusName="ends", EventPattern=pattern)
    events.put_targets(Rule="all", EventBusName="ends", Targets=[{"Id": "1", "Arn": arn}])
    assert isinstance(await send(aws, CallbackKind.EVENTBRIDGE, "ends"), Delivered)
    messages = [m for m in received(queue) if "detail-type" in m["Body"]]
    assert json.loads(messages[0]["Body"])["detail"] == {
        "webhook_id": "job-0-1-1",
        **json.loads(BODY),
    }


async def test_a_bucket_gets_an_object(aws: AwsSender) -> None:
    """Its key is the prefix and the message's id, so a repetition writes the same object."""
    client: Any = boto3.client("s3")
    client.create_bucket(
        Bucket="ends", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"}
    )
    for _ in range(2):
        assert isinstance(await send(aws, CallbackKind.S3, "ends/jobs/"), Delivered)
    listed = client.list_objects_v2(Bucket="ends")["Contents"]
    assert [entry["Key"] for entry in listed] == ["jobs/job-0-1-1.json"]
    found = client.get_object(Bucket="ends", Key="jobs/job-0-1-1.json")
    assert found["Body"].read() == BODY
    assert found["Metadata"]["webhook-id"] == "job-0-1-1"


async def test_a_function_is_invoked(aws: AwsSender) -> None:
    """As an event, which Lambda queues. moto emulates one without Docker."""
    iam: Any = boto3.client("iam")
    role = iam.create_role(RoleName="r", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    client: Any = boto3.client("lambda")
    client.create_function(
        FunctionName="on-end",
        Runtime="python3.11",
        Role=role,
        Handler="f.handler",
        Code={"ZipFile": b"PK\x05\x06" + b"\x00" * 18},
    )
    assert isinstance(await send(aws, CallbackKind.LAMBDA, "on-end"), Delivered)


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (CallbackKind.SQS, "https://sqs.eu-central-1.amazonaws.com/123456789012/absent"),
        (CallbackKind.SNS, "arn:aws:sns:eu-central-1:123456789012:absent"),
        (CallbackKind.S3, "absent-bucket/x"),
    ],
)
async def test_a_missing_destination_is_a_permanent_error(
    aws: AwsSender, kind: CallbackKind, target: str
) -> None:
    """The attempt is not repeated."""
    outcome = await send(aws, kind, target)
    assert isinstance(outcome, DeliveryRefused), outcome
    assert "absent" not in outcome.note


async def test_an_unreachable_aws_is_tried_again(
    aws: AwsSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without credentials."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert isinstance(
        await send(AwsSender(timeout_s=2.0), CallbackKind.SNS, "arn:x"), DeliveryFailed
    )


def test_only_targets_of_the_operator_are_allowed() -> None:
    """Patterns name kind and target. By default none is allowed."""
    queue = Callback(kind=CallbackKind.SQS, target="https://sqs.example/1/ends")
    assert not is_open_target(queue, ())
    assert not is_open_target(queue, ("sns:*", "sqs:https://sqs.example/2/*"))
    assert is_open_target(queue, ("s3:*", "sqs:https://sqs.example/1/*"))
