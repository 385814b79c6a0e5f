"""A small server of OpenAI's completions that follows the script in each prompt's first id.

It counts its responses. Only the server and the sleeping caller move the clock.
"""

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from contract.connection import end_tasks

ANSWER, SHED, FAIL, BREAK, STALL, CANCEL, REFUSE, CUT, SPLIT = range(10, 19)
TTFT_S, ITL_S, STALL_S = 0.5, 0.25, 8.0


class WatchedClock:
    """A clock that moves when told to, and knows whether it was read."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._looked = asyncio.Event()

    def __call__(self) -> float:
        self._looked.set()
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)

    def pass_time(self, seconds: float) -> None:
        """Moves the clock, and forgets who has read it."""
        self.now_s += seconds
        self._looked.clear()

    async def until_looked_at(self) -> None:
        await self._looked.wait()


class ScriptedServer:
    """`counts` has the number of responses by outcome, and of `tokens`."""

    def __init__(self, clock: WatchedClock) -> None:
        self.clock = clock
        self.counts: Counter[str] = Counter()
        self.bodies: list[dict[str, object]] = []
        self.url = ""

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        what = body["prompt"][0]
        if what == SHED:
            self.counts["shed"] += 1
            refusal = {"error": {"code": "lane_full", "message": "full"}}
            return JSONResponse(refusal, 429, {"x-dropped-reason": "lane_full"})
        if what == REFUSE:
            self.counts["failed"] += 1
            return JSONResponse({"error": {"code": "bad", "message": "no"}}, 400)
        return StreamingResponse(self._stream(what, body), media_type="text/event-stream")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "scripted"}]})

    async def _stream(self, what: int, body: dict[str, int]) -> AsyncIterator[bytes]:
        """Sends one token at a time, each once the client has noted the previous one."""
        num = body["max_tokens"]
        for index in range(num):
            self.clock.pass_time(TTFT_S if index == 0 else ITL_S)
            if index == num // 2 and what in (FAIL, CANCEL, BREAK, CUT):
                self.counts["cancelled" if what == CANCEL else "failed"] += 1
                if what == BREAK:
                    raise asyncio.CancelledError  # the connection ends before the last chunk
                if what != CUT:
                    code = "cancelled" if what == CANCEL else "engine_error"
                    yield _event({"error": {"code": code, "message": "a secret"}})
                return
            if index == 1 and what == STALL:
                self.clock.pass_time(STALL_S)
            self.counts["tokens"] += 1
            is_last = index == num - 1
            chunk = {"text": "\u2028x", "finish_reason": "length" if is_last else None}
            data = _event({"choices": [chunk]}, what == SPLIT)
            if what == SPLIT:  # one line in two parts is one token
                yield data[:9]
                data = data[9:]
            yield data
            await self.clock.until_looked_at()
        self.counts["succeeded"] += 1
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num}  # type: ignore[arg-type]
        yield _event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def _event(data: object, is_plain: bool = False) -> bytes:
    """Line separators in the text are not escaped, as with some servers."""
    return b"data: " + json.dumps(data, ensure_ascii=is_plain).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def scripted_server(clock: WatchedClock) -> AsyncIterator[ScriptedServer]:
    """Runs in this event loop, on a free port of loopback."""
    script = ScriptedServer(clock)
    app = Starlette(
        routes=[
            Route("/v1/completions", script.complete, methods=["POST"]),
            Route("/v1/models", script.models),
        ]
    )
    listener = socket.create_server(("127.0.0.1", 0))
    script.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield script
    finally:
        server.should_exit = True
        await asyncio.wait([task], timeout=10)
        await end_tasks(task)
