"""Jobs that do not arrive by HTTP: direct invocations and SQS messages.

Both are passed to `POST /v1/jobs` of the app in this process, which validates them. IAM has
authorised the sender, so a request without a key gets the gateway's own key.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec
from starlette.types import ASGIApp, Message

log = logging.getLogger("batchway.gateway")

_PATH = "/v1/jobs"
_ACCEPTED = 202


class JobRequest(msgspec.Struct, frozen=True):
    """A body of `POST /v1/jobs` and its headers, with lower-case names."""

    body: bytes
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def of_event(cls, event: Mapping[str, Any]) -> Self:
        """Reads a direct invocation: the job's body, with optional `headers`."""
        job = {name: value for name, value in event.items() if name != "headers"}
        given = event.get("headers") or {}
        return cls(json.dumps(job).encode(), {name.lower(): str(given[name]) for name in given})

    @classmethod
    def of_message(cls, record: Mapping[str, Any]) -> Self:
        """Reads an SQS message: its text is the body, its string attributes are headers.

        SQS delivers at least once, so the message id is the default idempotency key.
        """
        headers = {"idempotency-key": f"sqs-{record['messageId']}"}
        for name, attribute in record.get("messageAttributes", {}).items():
            if attribute.get("dataType") == "String":
                headers[name.lower()] = attribute["stringValue"]
        return cls(record["body"].encode(), headers)


async def answer_job(app: ASGIApp, request: JobRequest, api_key: str | None) -> dict[str, Any]:
    """Status, headers and parsed JSON body, as a direct invocation returns them."""
    status, headers, body = await _post(app, request, api_key)
    return {"statusCode": status, "headers": headers, "body": json.loads(body)}


async def answer_messages(
    app: ASGIApp, records: Sequence[Mapping[str, Any]], api_key: str | None
) -> dict[str, Any]:
    """Queues each message. SQS keeps those that were not accepted, and after some attempts moves
    them to its dead-letter queue."""
    accepted = await asyncio.gather(*(_accepts(app, record, api_key) for record in records))
    failed = [record for record, is_in in zip(records, accepted, strict=True) if not is_in]
    return {"batchItemFailures": [{"itemIdentifier": record["messageId"]} for record in failed]}


async def _accepts(app: ASGIApp, record: Mapping[str, Any], api_key: str | None) -> bool:
    status, _, body = await _post(app, JobRequest.of_message(record), api_key)
    if status != _ACCEPTED:
        code = json.loads(body).get("error", {}).get("code")
        log.warning("message refused message_id=%s %d %s", record["messageId"], status, code)
    return status == _ACCEPTED


async def _post(
    app: ASGIApp, request: JobRequest, api_key: str | None
) -> tuple[int, dict[str, str], bytes]:
    headers = {"host": "localhost", "content-type": "application/json"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    headers |= request.headers
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "https",
        "path": _PATH,
        "raw_path": _PATH.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
    }
    unread: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        return unread.pop() if unread else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *parts = sent
    answered = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], answered, b"".join(part.get("body", b"") for part in parts)
