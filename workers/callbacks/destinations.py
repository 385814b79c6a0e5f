"""Sends messages to AWS: a queue, a topic, a bus, a function or a bucket.

boto3 is imported on first use and finds credentials and region itself.
"""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from contract.callbacks import Callback, CallbackKind
from workers.callbacks.retries import Delivered, DeliveryFailed, DeliveryRefused, Outcome

MAX_BYTES = 250_000  # of a body: queues, topics and buses accept 256 KiB including attributes

_SERVICES = {
    CallbackKind.SQS: "sqs",
    CallbackKind.SNS: "sns",
    CallbackKind.EVENTBRIDGE: "events",
    CallbackKind.LAMBDA: "lambda",
    CallbackKind.S3: "s3",
}
# Parts of the codes of errors with a status below 500 after which a retry may succeed.
_TRANSIENT = ("Throttl", "TooManyRequests", "RequestLimit", "SlowDown", "Timeout", "Expired")


class AwsSender:
    """The sender of one process, with one thread-safe client per service."""

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
            return DeliveryFailed("boto3 is not installed: `pip install 'batchway[aws]'`")
        try:
            client = self._client(_SERVICES[callback.kind])
            return _put(client, callback, event_type, body, headers)
        except ClientError as exc:
            code = str(exc.response.get("Error", {}).get("Code", "unknown"))
            status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
            if status >= 500 or any(word in code for word in _TRANSIENT):
                return DeliveryFailed(f"AWS answered {code}")
            return DeliveryRefused(f"AWS answered {code}")
        except BotoCoreError as exc:  # for example no credentials or no route
            return DeliveryFailed(f"AWS was not reached ({type(exc).__name__})")

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


def _put(
    client: Any, callback: Callback, event_type: str, body: str, headers: Mapping[str, str]
) -> Outcome:
    """Sends one message by the client of its service. Raises ClientError, BotoCoreError."""
    target, message_id = callback.target, headers["webhook-id"]
    attributes = {k: {"DataType": "String", "StringValue": v} for k, v in headers.items()}
    fifo: dict[str, str] = {}
    if target.endswith(".fifo"):
        fifo = {"MessageGroupId": message_id, "MessageDeduplicationId": message_id}
    event = f'{{"webhook_id":"{message_id}",{body[1:]}'  # ids need no escaping
    match callback.kind:
        case CallbackKind.SQS:
            client.send_message(
                QueueUrl=target, MessageBody=body, MessageAttributes=attributes, **fifo
            )
            return Delivered("in the queue")
        case CallbackKind.SNS:
            client.publish(TopicArn=target, Message=body, MessageAttributes=attributes, **fifo)
            return Delivered("on the topic")
        case CallbackKind.EVENTBRIDGE:
            entry = {"Source": "batchway", "DetailType": event_type, "EventBusName": target}
            reply = client.put_events(Entries=[entry | {"Detail": event}])
            if reply["FailedEntryCount"]:
                return DeliveryFailed(
                    f"AWS answered {reply['Entries'][0].get('ErrorCode', 'unknown')}"
                )
            return Delivered("on the bus")
        case CallbackKind.LAMBDA:
            client.invoke(FunctionName=target, InvocationType="Event", Payload=event.encode())
            return Delivered("invoked")
        case CallbackKind.S3:
            bucket, _, prefix = target.partition("/")
            client.put_object(
                Bucket=bucket,
                Key=f"{prefix}{message_id}.json",
                Body=body.encode(),
                ContentType="application/json",
                Metadata=dict(headers),
            )
            return Delivered("in the bucket")
    raise ValueError(f"{callback.kind} is not an AWS service")
