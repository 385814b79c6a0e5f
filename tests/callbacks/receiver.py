"""A receiver on loopback that verifies every message and answers as a test prescribes."""

import asyncio
import json
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from standardwebhooks import Webhook

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@dataclass(frozen=True, slots=True)
class Message:
    """One verified delivery. `at_s`: Unix time of its arrival."""

    id: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    at_s: float
    was_accepted: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to a delivery, after `delay_s`. Status 0 breaks the connection."""

    status: int = 204
    delay_s: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)
    endless: bool = False  # the response never ends


Behaviour = Callable[[str], Answer]


def always(answer: Answer) -> Behaviour:
    return lambda _: answer


def half_of_the_time(rng: random.Random) -> Behaviour:
    """Fails half of the deliveries, in different ways."""
    failures = (Answer(500), Answer(503), Answer(0), Answer(302, headers={"location": "/other"}))
    return lambda _: rng.choice(failures) if rng.random() < 0.5 else Answer()


class Receiver:
    """A server on a free port. Each path has its own behaviour."""

    def __init__(
        self, behaviours: Mapping[str, Behaviour], *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._tls = tls
        self.behaviours = dict(behaviours)
        self.messages: list[Message] = []
        self.forged: list[str] = []  # names of verification errors
        self.news = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._port = 0

    async def __aenter__(self) -> "Receiver":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}{path}"

    def accepted(self) -> dict[str, list[Message]]:
        """Messages answered with 2xx, by message id."""
        found: dict[str, list[Message]] = {}
        for message in self.messages:
            if message.was_accepted:
                found.setdefault(message.id, []).append(message)
        return found

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Returns once the condition holds; it is checked after each delivery."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.news.clear()
                await self.news.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {
                name.lower(): value
                for name, _, value in (line.partition(": ") for line in head[1:] if line)
            }
            body = await reader.readexactly(int(headers["content-length"]))
            answer = self._answer_to(head[0].split()[1], headers, body)
            await asyncio.sleep(answer.delay_s)
            if answer.endless:
                writer.write(b"HTTP/1.1 200 X\r\n\r\n")
                while True:
                    writer.write(b"x" * 65_536)
                    await writer.drain()
            if answer.status:
                extra = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
                writer.write(
                    f"HTTP/1.1 {answer.status} X\r\n{extra}content-length: 0\r\n\r\n".encode()
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the sender was killed
        finally:
            writer.close()

    def _answer_to(self, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        try:
            Webhook(SECRET).verify(body, dict(headers))
        except Exception as exc:
            self.forged.append(type(exc).__name__)
            return Answer(400)
        answer = self.behaviours[path.split("?")[0]](path)
        accepted = 200 <= answer.status < 300
        message = Message(headers["webhook-id"], json.loads(body), headers, time.time(), accepted)
        self.messages.append(message)
        self.news.set()
        return answer
