"""What Lambda calls: requests of API Gateway (v1 and v2), a job's body, messages of a queue.

All of them become requests to the one app, on one event loop that an execution environment keeps.
Nothing exists before the first invocation but imported code: a snapshot (SnapStart) holds no
connection and no secret, so there is nothing to reopen or to reread after a restore.
"""

import asyncio
import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any

from mangum import Mangum

from gateway.aws.environment import load_settings
from gateway.aws.job_requests import JobRequest, answer_job, answer_messages
from gateway.http.app import create_app
from gateway.jobs.patience import TIME_LEFT
from gateway.settings import GatewaySettings

log = logging.getLogger("batchway.gateway")
log.setLevel(logging.INFO)  # Lambda's own handler writes it to the function's log

_STARTED_BY = "AWS_LAMBDA_INITIALIZATION_TYPE"  # Lambda's own
_BY_A_REQUEST = "on-demand"


def load_ahead(environ: Mapping[str, str] = os.environ) -> None:
    """Loads what a first request needs where nobody waits: before a snapshot is taken (SnapStart),
    or in an environment that is kept ready (provisioned concurrency)."""
    if environ.get(_STARTED_BY, _BY_A_REQUEST) != _BY_A_REQUEST:
        importlib.import_module("tokenizers.decoders")
        importlib.import_module("boto3")  # in Lambda's Python; it reads the secrets


load_ahead()

_MARGIN_S = 2.0  # to answer in, before the function is stopped

_function: "Function | None" = None


def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """The entry point of ApiFunction."""
    global _function
    if _function is None:
        _function = Function(load_settings())
    return _function(event, context)


class Function:
    """One execution environment: the app, its loop, and what they keep between invocations."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)  # where Mangum looks for it
        self._app = create_app(settings)
        self._lifespan = self._app.router.lifespan_context(self._app)
        self._loop.run_until_complete(self._lifespan.__aenter__())
        self._http = Mangum(self._timed, lifespan="off")  # ours goes on between invocations
        self._api_key = settings.api_key

    def __call__(self, event: dict[str, Any], context: Any) -> dict[str, Any]:
        """Answers one event, in the shape that its sender expects."""
        if "requestContext" in event:
            return self._http(event, context)
        if "Records" in event:
            return self._run(answer_messages(self._app, event["Records"], self._api_key))
        return self._run(answer_job(self._app, JobRequest.of_event(event), self._api_key))

    async def _timed(self, scope: Any, receive: Any, send: Any) -> None:
        """The app, told how much time the request has: a call that needs more becomes a job."""
        if (context := scope.get("aws.context")) is not None:
            left_s = context.get_remaining_time_in_millis() / 1000 - _MARGIN_S
            scope.setdefault("state", {})[TIME_LEFT] = left_s
        await self._app(scope, receive, send)

    def close(self) -> None:
        """Ends what runs between invocations; Lambda itself never asks for it."""
        self._loop.run_until_complete(self._lifespan.__aexit__(None, None, None))
        asyncio.set_event_loop(None)
        self._loop.close()

    def _run(self, work: Any) -> dict[str, Any]:
        answered: dict[str, Any] = self._loop.run_until_complete(work)
        return answered
