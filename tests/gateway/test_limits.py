"""The layers around the app, without a server."""

import logging

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from gateway.limits import LastNet

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
        await LastNet(reads_the_body)({"type": "http", "headers": []}, leaves, keep)

    assert sent == []
    assert caplog.records == []
