"""Sends messages to AWS: a queue, a topic, a bus, a function or a bucket.

boto3 is imported on first use; it finds credentials and region itself.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

from contract.callbacks import Callback, CallbackKind
from workers.callbacks.ladder import Delivered, Failed, Outcome, Refused

MAX_BYTES = 250_000  # of a body: queues, topics and buses accept 256 KiB with envelope

_SERVICES = {
    CallbackKind.SQS: "sqs",
    CallbackKind.SNS: "sns",
    CallbackKind.EVENTBRIDGE: "events",
    CallbackKind.LAMBDA: "lambda",
    CallbackKind.S3: "s3",
}
# Errors reported as the caller's (4xx) that a retry may cure.
_TRANSIENT = ("Throttl", "TooManyRequests", "RequestLimit", "SlowDown", "Timeout", "Expired")


class AwsSender:
    """One per process; has one thread-safe client per service."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._clients: dict[str, Any] = {}
        self._lock = threading.Lock()

    async def send(
        self, callback: Callback, event_type: str, body: bytes, headers: Mapping[str, str]
    ) -> Outcome:
        """Returns the outcome; raises no AWS error."""
        return await asyncio.to_thread(self._send, callback, event_type, body.decode(), headers)

    def _send(
        self, callback: Callback, event_type: str, body: str, headers: Mapping[str, str]
    ) -> Outcome:
        try:
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError:
            return Failed("boto3 is not installed: `pip install 'batchway[aws]'`")
        try:
            client = self._client(_SERVICES[callback.kind])
            return _PUTS[callback.kind](client, callback.target, event_type, body, headers)
        except ClientError as exc:
            code = str(exc.response.get("Error", {}).get("Code", "unknown"))
            status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
            if status >= 500 or any(word in code for word in _TRANSIENT):
                return Failed(f"AWS said {code}")
            return Refused(f"AWS said {code}")
        except BotoCoreError as exc:  # for example no credentials or no route
            return Failed(f"AWS was not reached ({type(exc).__name__})")

    def _client(self, service: str) -> Any:
        import boto3
        from botocore.config import Config

        with self._lock:  # creating clients is not thread-safe
            if service not in self._clients:
                patience = self._timeout_s / 2
                config = Config(
                    connect_timeout=patience,
                    read_timeout=patience,
                    retries={"total_max_attempts": 1},
                )
                self._clients[service] = boto3.client(service, config=config)
            return self._clients[service]


def _attributes(headers: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return {name: {"DataType": "String", "StringValue": text} for name, text in headers.items()}


def _to_queue(client: Any, queue: str, _: str, body: str, headers: Mapping[str, str]) -> Outcome:
    fields: dict[str, Any] = {"QueueUrl": queue, "MessageBody": body}
    if queue.endswith(".fifo"):
        fields["MessageGroupId"] = fields["MessageDeduplicationId"] = headers["webhook-id"]
    client.send_message(**fields, MessageAttributes=_attributes(headers))
    return Delivered("in the queue")


def _to_topic(client: Any, topic: str, _: str, body: str, headers: Mapping[str, str]) -> Outcome:
    fields: dict[str, Any] = {"TopicArn": topic, "Message": body}
    if topic.endswith(".fifo"):
        fields["MessageGroupId"] = fields["MessageDeduplicationId"] = headers["webhook-id"]
    client.publish(**fields, MessageAttributes=_attributes(headers))
    return Delivered("on the topic")


def _to_bus(
    client: Any, bus: str, event_type: str, body: str, headers: Mapping[str, str]
) -> Outcome:
    detail = f'{{"webhook_id":"{headers["webhook-id"]}",{body[1:]}'  # ids need no escaping
    entry = {"Source": "batchway", "DetailType": event_type, "Detail": detail, "EventBusName": bus}
    reply = client.put_events(Entries=[entry])
    if reply["FailedEntryCount"]:
        return Failed(f"AWS said {reply['Entries'][0].get('ErrorCode', 'unknown')}")
    return Delivered("on the bus")


def _to_function(client: Any, name: str, _: str, body: str, headers: Mapping[str, str]) -> Outcome:
    event = f'{{"webhook_id":"{headers["webhook-id"]}",{body[1:]}'
    client.invoke(FunctionName=name, InvocationType="Event", Payload=event.encode())
    return Delivered("invoked")


def _to_bucket(client: Any, place: str, _: str, body: str, headers: Mapping[str, str]) -> Outcome:
    bucket, _, prefix = place.partition("/")
    key = f"{prefix}{headers['webhook-id']}.json"
    client.put_object(
        Bucket=bucket,
        Key=key,
        Body=body.encode(),
        ContentType="application/json",
        Metadata=dict(headers),
    )
    return Delivered("in the bucket")


_Put = Callable[[Any, str, str, str, Mapping[str, str]], Outcome]
_PUTS: Mapping[CallbackKind, _Put] = {
    CallbackKind.SQS: _to_queue,
    CallbackKind.SNS: _to_topic,
    CallbackKind.EVENTBRIDGE: _to_bus,
    CallbackKind.LAMBDA: _to_function,
    CallbackKind.S3: _to_bucket,
}
