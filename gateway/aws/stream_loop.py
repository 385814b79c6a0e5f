"""The loop of StreamFunction: takes an event, runs the app, sends its answer as it is produced.

`python -m gateway.aws.stream_loop`, instead of Lambda's own loop for Python, which sends an answer
when it is complete. The app is told how much time a request has: a call that needs more becomes a
job. Lambda does not tell when a caller leaves, so what still goes on shortly before the function's
time is up is ended: to the app that is a closed connection.
"""

import asyncio
import contextlib
import logging
import os
import time
from typing import Any

from mangum import Mangum
from mangum.types import ASGI
from starlette.types import Message

from contract import tasks
from gateway.aws import imports_are_done
from gateway.aws.environment import load_settings
from gateway.aws.runtime_api import Invocation, RuntimeApi, RuntimeApiError, StreamedAnswer
from gateway.http.app import create_app
from gateway.jobs.patience import TIME_LEFT

log = logging.getLogger("batchway.gateway")

DEADLINE_MARGIN_S = 2.0  # for last words, before Lambda stops the environment
_CUT = "Batchway.AnswerCut"
_UNKNOWN = "Batchway.UnknownEvent"


async def serve(app: ASGI, runtime: RuntimeApi, *, stall_s: float) -> None:
    """Answers one event after the other until cancelled; ends an answer of which nothing is taken
    for so long. Raises RuntimeApiError, OSError.
    """
    events = Mangum(app, lifespan="off")
    while True:
        invocation = await runtime.next()
        if "requestContext" not in invocation.event:
            message = "this function answers requests of API Gateway only"
            await runtime.fail(invocation, _UNKNOWN, message)
            continue
        request: Any = events.infer(invocation.event, None)  # type: ignore[arg-type]
        left_s = invocation.deadline_s - time.time() - 2 * DEADLINE_MARGIN_S
        scope = request.scope | {"state": {TIME_LEFT: left_s}}
        exchange = Exchange(runtime, invocation, request.body, stall_s)
        try:
            await exchange.run(app, scope)
        except OSError:
            log.info("answer no longer wanted request_id=%s", invocation.id)
        except RuntimeApiError as exc:
            log.warning("answer refused request_id=%s %s", invocation.id, exc)


class Exchange:
    """One request and its streamed answer, as the app sees them."""

    def __init__(
        self, runtime: RuntimeApi, invocation: Invocation, body: bytes, stall_s: float
    ) -> None:
        self._runtime = runtime
        self._invocation = invocation
        self._stall_s = stall_s
        self._unread: list[Message] = [
            {"type": "http.request", "body": body or b"", "more_body": False}
        ]
        self._gone = asyncio.Event()
        self._closing = contextlib.AsyncExitStack()
        self._answer: StreamedAnswer | None = None
        self._is_complete = False

    async def run(self, app: ASGI, scope: Any) -> None:
        """Raises RuntimeApiError, OSError where nobody takes the answer."""
        async with self._closing:
            clock = asyncio.create_task(self._watch_deadline())
            try:
                await app(scope, self._receive, self._send)
            except Exception as exc:
                log.error("unexpected %s request_id=%s", type(exc).__name__, self._invocation.id)
            finally:
                await tasks.end(clock)
            async with asyncio.timeout(self._stall_s):  # a TimeoutError is an OSError
                await self._finish()

    async def _finish(self) -> None:
        if self._answer is None:
            await self._runtime.fail(self._invocation, _CUT, "no answer")
        elif self._is_complete:
            await self._answer.finish()
        else:
            await self._answer.abort(_CUT, "the answer ended before it was complete")

    async def _receive(self) -> Message:
        if self._unread:
            return self._unread.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(name.decode(), value.decode()) for name, value in message["headers"]]
            answering = self._runtime.answer(self._invocation, message["status"], headers)
            self._answer = await self._closing.enter_async_context(answering)
            self._answer.reply.add_done_callback(lambda _: self._gone.set())
            return
        assert self._answer is not None
        async with asyncio.timeout(self._stall_s):
            await self._answer.write(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)

    async def _watch_deadline(self) -> None:
        await asyncio.sleep(self._invocation.deadline_s - DEADLINE_MARGIN_S - time.time())
        self._gone.set()


async def main() -> None:
    """Serves the gateway's app until Lambda stops the environment."""
    imports_are_done()
    settings = load_settings()
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        runtime = RuntimeApi(os.environ["AWS_LAMBDA_RUNTIME_API"])
        await serve(app, runtime, stall_s=settings.stall_timeout_s)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    asyncio.run(main())
