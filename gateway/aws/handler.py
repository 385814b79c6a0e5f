"""The Lambda handler for API Gateway (v1 and v2), direct invocations and SQS messages.

All become requests to one app, on one event loop for each execution environment. Nothing is created
before the first invocation, so that a snapshot (SnapStart) contains no connection and no secret.
Direct invocations and SQS messages are passed to `POST /v1/jobs`, which validates them. IAM has
authorised their sender, so one without a key gets the gateway's own key.
"""

import asyncio
import importlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec
from mangum import Mangum
from starlette.types import ASGIApp, Message

from gateway.app import create_app
from gateway.aws.environment import load_settings
from gateway.follow.sync_call import TIME_LEFT
from gateway.memory import give_back_memory
from gateway.settings import GatewaySettings

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


log.setLevel(logging.INFO)  # Lambda's own handler writes it to the function's log

_STARTED_BY = "AWS_LAMBDA_INITIALIZATION_TYPE"  # set by Lambda
_BY_A_REQUEST = "on-demand"


def load_ahead(environ: Mapping[str, str] = os.environ) -> None:
    """Imports what the first request needs if nobody waits for it: before a snapshot (SnapStart),
    or with provisioned concurrency."""
    if environ.get(_STARTED_BY, _BY_A_REQUEST) != _BY_A_REQUEST:
        importlib.import_module("tokenizers.decoders")
        importlib.import_module("boto3")  # in Lambda's Python; reads the secrets


load_ahead()

_MARGIN_S = 2.0  # time to answer before Lambda stops the function

_function: "Function | None" = None


def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """The entry point of ApiFunction."""
    global _function
    if _function is None:
        give_back_memory()
        _function = Function(load_settings())
    return _function(event, context)


class Function:
    """One execution environment: the app and its event loop, kept between invocations."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)  # Mangum looks for it here
        self._app = create_app(settings)
        self._lifespan = self._app.router.lifespan_context(self._app)
        self._loop.run_until_complete(self._lifespan.__aenter__())
        self._http = Mangum(self._timed, lifespan="off")  # the lifespan above outlasts invocations
        self._api_key = settings.api_key

    def __call__(self, event: dict[str, Any], context: Any) -> dict[str, Any]:
        """Answers one event, in the format of its source."""
        if "requestContext" in event:
            return self._http(event, context)
        if "Records" in event:
            return self._run(answer_messages(self._app, event["Records"], self._api_key))
        return self._run(answer_job(self._app, JobRequest.of_event(event), self._api_key))

    async def _timed(self, scope: Any, receive: Any, send: Any) -> None:
        """Calls the app with the time that the request has left: a call that needs more becomes a
        job."""
        if (context := scope.get("aws.context")) is not None:
            left_s = context.get_remaining_time_in_millis() / 1000 - _MARGIN_S
            scope.setdefault("state", {})[TIME_LEFT] = left_s
        await self._app(scope, receive, send)

    def close(self) -> None:
        """Ends background tasks. Lambda never calls this."""
        self._loop.run_until_complete(self._lifespan.__aexit__(None, None, None))
        asyncio.set_event_loop(None)
        self._loop.close()

    def _run(self, work: Any) -> dict[str, Any]:
        answered: dict[str, Any] = self._loop.run_until_complete(work)
        return answered
