"""The Lambda handler for API Gateway (v1 and v2), and for events that are jobs (`intake`).

All become requests to one app, on one event loop for each execution environment. Nothing is created
before the first invocation, so that a snapshot (SnapStart) contains no connection and no secret.
"""

import asyncio
import gc
import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

gc.disable()  # imports leave no garbage to look for

# ruff: noqa: E402
from mangum import Mangum

from gateway.app import create_app
from gateway.aws.environment import load_settings
from gateway.aws.intake import DEAD_LETTERS_VARIABLE, Intake
from gateway.files import ANSWER_BYTES
from gateway.follow.sync_call import TIME_LEFT
from gateway.memory import give_back_memory
from gateway.settings import GatewaySettings

log = logging.getLogger("batchway.gateway")

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
gc.freeze()
gc.enable()

_MARGIN_S = 2.0  # time to answer before Lambda stops the function
_ANSWER_BYTES = 4 * 2**20  # Lambda takes 6 MB with what is around them, in base64

_function: "ExecutionEnvironment | None" = None


def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """The entry point of ApiFunction."""
    global _function
    if _function is None:
        give_back_memory()
        _function = ExecutionEnvironment(load_settings())
    return _function(event, context)


class ExecutionEnvironment:
    """One execution environment: the app and its event loop, kept between invocations."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)  # Mangum looks for it here
        self._app = create_app(settings)
        self._lifespan = self._app.router.lifespan_context(self._app)
        self._loop.run_until_complete(self._lifespan.__aenter__())
        self._http = Mangum(self._timed, lifespan="off")  # the lifespan above outlasts invocations
        self._intake = Intake(
            self._app,
            settings.api_key,
            max_bytes=settings.max_body_bytes,
            own_bucket=urlsplit(settings.object_store).netloc,
            dead_letters_url=os.environ.get(DEAD_LETTERS_VARIABLE, ""),
        )

    def __call__(self, event: dict[str, Any], context: Any) -> dict[str, Any]:
        """Answers one event, in the format of its source. Raises JobRefused."""
        if "requestContext" in event:
            return self._http(event, context)
        match event:
            case {"Records": [{"eventSource": "aws:sqs"}, *_]}:
                return self._run(self._intake.answer_messages(event["Records"]))
        invocation_id = getattr(context, "aws_request_id", "")
        return self._run(self._intake.answer(event, invocation_id))

    async def _timed(self, scope: Any, receive: Any, send: Any) -> None:
        """Calls the app with the time that the request has left, in which a call becomes a job,
        and the length that its answer may have."""
        scope["scheme"] = "https"  # whatever a caller's X-Forwarded-Proto says
        state = scope.setdefault("state", {})
        state[ANSWER_BYTES] = _ANSWER_BYTES
        if (context := scope.get("aws.context")) is not None:
            state[TIME_LEFT] = context.get_remaining_time_in_millis() / 1000 - _MARGIN_S
        await self._app(scope, receive, send)

    def close(self) -> None:
        """Ends background tasks. Lambda never calls this."""
        self._loop.run_until_complete(self._lifespan.__aexit__(None, None, None))
        asyncio.set_event_loop(None)
        self._loop.close()

    def _run(self, work: Any) -> dict[str, Any]:
        answered: dict[str, Any] = self._loop.run_until_complete(work)
        return answered
