"""The layer around the routes, without a server."""

import logging

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from gateway.front import Front
from gateway.limits import Limits
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings
from telemetry.tracing import Tracing

pytestmark = pytest.mark.anyio


async def test_a_caller_that_leaves_before_its_request_is_whole_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is answered, for nobody is there, and nothing is logged as unexpected."""
    sent: list[Message] = []

    async def reads_the_body(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()

    async def leaves() -> Message:
        return {"type": "http.disconnect"}

    async def keep(message: Message) -> None:
        sent.append(message)

    with caplog.at_level(logging.INFO):
        limits = Limits(GatewaySettings(redis_url="redis://nowhere", allowed_hosts=("*",)))
        front = Front(reads_the_body, limits, GatewayMetrics(), Tracing("test"), lambda: 0.0)
        await front({"type": "http", "headers": []}, leaves, keep)

    assert sent == []
    assert caplog.records == []
