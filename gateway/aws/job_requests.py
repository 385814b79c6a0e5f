"""Jobs that come without HTTP: a direct invocation, or messages of an SQS queue.

Both are put to `POST /v1/jobs` of the app, in this process, so that they meet the same checks.
Whoever may invoke the function or write to the queue was let in by IAM: a request that brings no
key of its own is given the gateway's.
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
    """A body of `POST /v1/jobs` and the headers that go with it, names in lower case."""

    body: bytes
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def of_event(cls, event: Mapping[str, Any]) -> Self:
        """A direct invocation: the job's body, and `headers` beside it where there are any."""
        job = {name: value for name, value in event.items() if name != "headers"}
        given = event.get("headers") or {}
        return cls(json.dumps(job).encode(), {name.lower(): str(given[name]) for name in given})

    @classmethod
    def of_message(cls, record: Mapping[str, Any]) -> Self:
        """A message: its text is the body, its string attributes are headers.

        SQS delivers at least once, so its id serves as idempotency key where none is given.
        """
        headers = {"idempotency-key": f"sqs-{record['messageId']}"}
        for name, attribute in record.get("messageAttributes", {}).items():
            if attribute.get("dataType") == "String":
                headers[name.lower()] = attribute["stringValue"]
        return cls(record["body"].encode(), headers)


async def answer_job(app: ASGIApp, request: JobRequest, api_key: str | None) -> dict[str, Any]:
    """Status, headers and the JSON body, parsed: the shape of a direct invocation's answer."""
    status, headers, body = await _post(app, request, api_key)
    return {"statusCode": status, "headers": headers, "body": json.loads(body)}


async def answer_messages(
    app: ASGIApp, records: Sequence[Mapping[str, Any]], api_key: str | None
) -> dict[str, Any]:
    """Queues every message; those that were not accepted are named, and SQS keeps them.

    What can never be accepted comes back too, until the queue moves it to its dead letters, where
    somebody can look at it.
    """
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
