"""Lambda's events as bodies of `POST /v1/jobs`: direct invocations, and what EventBridge, SNS, S3
and SQS deliver, also one within another. Validates no body.

Every sender may deliver an event twice, so each has an idempotency key by default.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote_plus

import msgspec

from contract.errors import BatchwayError

Event = Mapping[str, Any]
Clients = Callable[[str], Any]  # boto3's, by the name of the service


class UnreadableEvent(BatchwayError):
    """No job can be made of an event, at no time. The message contains nothing of it."""


class EventUnavailable(BatchwayError):
    """What an event names cannot be read now."""


class JobRequest(msgspec.Struct, frozen=True):
    """A body of `POST /v1/jobs` and its headers, with lower-case names."""

    body: bytes
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)


def requests_of(
    event: Event,
    *,
    invocation_id: str = "",
    max_bytes: int,
    own_bucket: str = "",
    clients: Clients,
) -> list[JobRequest]:
    """The jobs of an event. Blocks while it reads objects of S3, of at most `max_bytes`, but none
    of `own_bucket`, which holds all tenants'. Raises UnreadableEvent, EventUnavailable."""
    key = f"lambda-{invocation_id}" if invocation_id else ""
    try:
        return _Reader(max_bytes, own_bucket, clients).jobs_of(event, key)
    except (KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise UnreadableEvent(f"an event with another form than its kind's: {exc!r}") from exc


class _Reader:
    def __init__(self, max_bytes: int, own_bucket: str, clients: Clients) -> None:
        self._max_bytes = max_bytes
        self._own_bucket = own_bucket
        self._clients = clients

    def jobs_of(self, event: Event, key: str) -> list[JobRequest]:
        """`key`: the idempotency key of an event that is itself a job's body."""
        if event.get("Event") == "s3:TestEvent":  # sent where notifications are set up
            return []
        if "Records" in event:
            return [job for record in event["Records"] for job in self._record(record)]
        if "requestPayload" in event:  # Lambda gave it up, and sent it to its destination
            return self.jobs_of(
                event["requestPayload"], f"lambda-{event['requestContext']['requestId']}"
            )
        if "detail-type" in event:
            return [_own(event["detail"], f"event-{event['id']}")]
        if event.get("Type") == "Notification":
            return self._notification(event)
        return [_own(event, key)]

    def _record(self, record: Event) -> list[JobRequest]:
        match record.get("eventSource") or record.get("EventSource"):
            case "aws:sqs":
                attributes = {
                    name: attribute["stringValue"]
                    for name, attribute in record.get("messageAttributes", {}).items()
                    if attribute.get("dataType") == "String"
                }
                return self._text(record["body"], attributes, f"sqs-{record['messageId']}")
            case "aws:sns":
                return self._notification(record["Sns"])
            case "aws:s3":
                return [self._object(record)]
        raise UnreadableEvent("an event whose source is none of SQS, SNS, S3 and EventBridge")

    def _notification(self, sent: Event) -> list[JobRequest]:
        attributes = {
            name: attribute["Value"]
            for name, attribute in sent.get("MessageAttributes", {}).items()
            if attribute["Type"] == "String"
        }
        return self._text(sent["Message"], attributes, f"sns-{sent['MessageId']}")

    def _text(self, text: str, attributes: Mapping[str, str], key: str) -> list[JobRequest]:
        """A message whose text is a job's body, with its attributes as headers, or an event."""
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if isinstance(event, dict) and _is_event(event):
            return self.jobs_of(event, key)
        headers = {"idempotency-key": key} | {name.lower(): attributes[name] for name in attributes}
        return [JobRequest(text.encode(errors="replace"), headers)]

    def _object(self, record: Event) -> JobRequest:
        """An object that was created: its content is the body."""
        name, found = record["s3"]["bucket"]["name"], record["s3"]["object"]
        if name == self._own_bucket:
            raise UnreadableEvent("an object of the gateway's own store")
        if not record["eventName"].startswith("ObjectCreated:"):
            raise UnreadableEvent(f"an event of S3 that creates no object: {record['eventName']}")
        if found.get("size", 0) > self._max_bytes:
            raise UnreadableEvent(f"an object of more than {self._max_bytes} bytes")
        place = [name, found["key"], found.get("versionId", ""), found.get("sequencer", "")]
        key = f"s3-{hashlib.sha256(json.dumps(place).encode()).hexdigest()}"
        return JobRequest(self._content(name, found["key"]), {"idempotency-key": key})

    def _content(self, bucket: str, key: str) -> bytes:
        """An object's bytes."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            found = self._clients("s3").get_object(Bucket=bucket, Key=unquote_plus(key))
            if found["ContentLength"] > self._max_bytes:
                raise UnreadableEvent(f"an object of more than {self._max_bytes} bytes")
            body: bytes = found["Body"].read()
        except ClientError as exc:
            code = exc.response.get("Error", {}).get("Code", "")
            if code == "NoSuchKey":
                raise UnreadableEvent("an object that is not there any more") from exc
            raise EventUnavailable(f"S3 refused an event's object ({code})") from exc
        except BotoCoreError as exc:
            raise EventUnavailable(f"S3 does not answer ({type(exc).__name__})") from exc
        return body


def _is_event(found: Event) -> bool:
    """Whether a message's text is an event: no job's body has these names."""
    names = ("Records", "requestPayload", "detail-type", "Message", "Event")
    return any(name in found for name in names)


def _own(event: Event, key: str) -> JobRequest:
    """A job's body beside optional `headers`."""
    job = {name: event[name] for name in event if name != "headers"}
    given = {name.lower(): str(value) for name, value in (event.get("headers") or {}).items()}
    headers = {"idempotency-key": key} | given if key else given
    return JobRequest(json.dumps(job).encode(), headers)
