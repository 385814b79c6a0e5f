"""Jobs by events: queues each, and raises or reports those that were not accepted, so that their
sender tries again. A message that can never be accepted goes to the dead letters, with its reason.

IAM has authorised their sender, so one without a key gets the gateway's own key.
"""

import asyncio
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from contract.errors import BatchwayError
from gateway.aws.environment import aws_client
from gateway.aws.events import (
    Event,
    EventUnavailable,
    JobRequest,
    UnreadableEvent,
    requests_of,
)

log = logging.getLogger("batchway.gateway")

DEAD_LETTERS_VARIABLE = "BATCHWAY_DEAD_LETTERS_URL"  # the queue of messages that were given up
# A message that was received so often has its last reason written down; below the queue's own
# `maxReceiveCount`, which gives no reason.
MAX_RECEIVES = 90

_PATH = "/v1/jobs"
_ACCEPTED = 202
# A model that is not there yet, a call that took too long, too many: another time may do.
_PASSING = (404, 408, 429)
_MAX_REASON = 1_000  # characters


class JobAnswer(msgspec.Struct, frozen=True):
    """Of `POST /v1/jobs`."""

    status: int
    headers: dict[str, str]
    body: Any

    @property
    def is_accepted(self) -> bool:
        return self.status == _ACCEPTED

    @property
    def may_pass(self) -> bool:
        """Whether a later attempt may be accepted."""
        return self.status >= 500 or self.status in _PASSING

    @property
    def reason(self) -> str:
        error = self.body.get("error", {})
        return f"{self.status} {error.get('code')}: {error.get('message')}"[:_MAX_REASON]

    def shown(self) -> dict[str, Any]:
        """As a direct invocation returns it."""
        return {"statusCode": self.status, "headers": self.headers, "body": self.body}


class JobRefused(Exception):
    """A job was not accepted; the message is its answer in JSON. Lambda tells a direct caller, and
    keeps an event that nobody waits for."""


class Intake:
    """The app's `POST /v1/jobs`, for events."""

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        *,
        max_bytes: int,
        own_bucket: str,
        dead_letters_url: str,
    ) -> None:
        self._app = app
        self._api_key = api_key
        self._max_bytes = max_bytes
        self._own_bucket = own_bucket
        self._dead_letters_url = dead_letters_url
        self._clients = functools.cache(aws_client)

    async def answer(self, event: Event, invocation_id: str) -> dict[str, Any]:
        """Queues the jobs of an event that may have been invoked asynchronously. Raises JobRefused
        if one was not accepted."""
        answers = await self._answers(event, invocation_id)
        for answer in answers:
            if not answer.is_accepted:
                log.warning("event refused invocation_id=%s %s", invocation_id, answer.status)
                raise JobRefused(json.dumps(answer.shown()))
        return answers[0].shown() if len(answers) == 1 else {"accepted": len(answers)}

    async def answer_messages(self, records: Sequence[Event]) -> dict[str, Any]:
        """Queues each message. SQS keeps those that were neither accepted nor written down."""
        settled = await asyncio.gather(*(self._settles(record) for record in records))
        failed = [
            record for record, is_settled in zip(records, settled, strict=True) if not is_settled
        ]
        return {"batchItemFailures": [{"itemIdentifier": record["messageId"]} for record in failed]}

    async def _settles(self, record: Event) -> bool:
        """Whether SQS may delete the message."""
        answers = await self._answers({"Records": [record]}, "")
        refused = [answer for answer in answers if not answer.is_accepted]
        if not refused:
            return True
        worst = next((answer for answer in refused if not answer.may_pass), refused[0])
        code = worst.body.get("error", {}).get("code")
        log.warning("message refused message_id=%s %d %s", record["messageId"], worst.status, code)
        received = int(record.get("attributes", {}).get("ApproximateReceiveCount", 1))
        if worst.may_pass and received < MAX_RECEIVES:
            return False
        return await asyncio.to_thread(self._gives_up, record, worst.reason)

    def _gives_up(self, record: Event, reason: str) -> bool:
        """Writes a message to the dead letters; False if that failed."""
        if not self._dead_letters_url:
            return False
        from botocore.exceptions import BotoCoreError, ClientError

        attributes = {
            name: {"DataType": "String", "StringValue": attribute["stringValue"]}
            for name, attribute in record.get("messageAttributes", {}).items()
            if attribute.get("dataType") == "String"
        }
        attributes["reason"] = {"DataType": "String", "StringValue": reason}
        try:
            self._clients("sqs").send_message(
                QueueUrl=self._dead_letters_url,
                MessageBody=record["body"],
                MessageAttributes=attributes,
            )
        except (BotoCoreError, ClientError) as exc:
            log.error(
                "no dead letter of message_id=%s: %s", record["messageId"], type(exc).__name__
            )
            return False
        return True

    async def _answers(self, event: Event, invocation_id: str) -> list[JobAnswer]:
        try:
            jobs = await asyncio.to_thread(
                requests_of,
                event,
                invocation_id=invocation_id,
                max_bytes=self._max_bytes,
                own_bucket=self._own_bucket,
                clients=self._clients,
            )
        except UnreadableEvent as exc:
            return [_refused(400, "unreadable_event", exc)]
        except EventUnavailable as exc:
            return [_refused(503, "event_unavailable", exc)]
        return await asyncio.gather(*(self._post(job) for job in jobs))

    async def _post(self, request: JobRequest) -> JobAnswer:
        headers = {"host": "localhost", "content-type": "application/json"}
        if self._api_key is not None:
            headers["authorization"] = f"Bearer {self._api_key}"
        headers |= request.headers
        unread: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            return unread.pop() if unread else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(_scope(headers), receive, send)
        start, *parts = sent
        answered = {name.decode(): value.decode() for name, value in start["headers"]}
        body = b"".join(part.get("body", b"") for part in parts)
        return JobAnswer(start["status"], answered, json.loads(body))


def _refused(status: int, code: str, exc: BatchwayError) -> JobAnswer:
    return JobAnswer(status, {}, {"error": {"code": code, "message": str(exc)}})


def _scope(headers: Mapping[str, str]) -> dict[str, Any]:
    raw = [
        (name.encode("latin-1", "replace"), value.encode("latin-1", "replace"))
        for name, value in headers.items()
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "https",
        "path": _PATH,
        "raw_path": _PATH.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": raw,
        "client": None,
        "server": None,
    }
