"""A worker's own page of metrics: `GET /metrics` on a port of its own. Counts, and no content.

Asks for no key, so it listens on loopback alone. Ends with the worker.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from contract.telemetry.families import counted_families
from contract.telemetry.metrics import Source
from contract.telemetry.text import CONTENT_TYPE, page
from workers.settings import WorkerSettings
from workers.supervisor.meter import Meter

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_HEAD_S = 5.0
_MAX_HEAD_BYTES = 8 * 1024


class MetricsUnservable(Exception):
    """The page's address cannot be listened on."""


class MetricsPage:
    """Serves what this worker counts, where its settings name a port."""

    def __init__(self, settings: WorkerSettings, meter: Meter) -> None:
        self._settings = settings
        self._meter = meter

    async def serve(self) -> None:
        """Until cancelled. Raises MetricsUnservable."""
        if self._settings.metrics_port is None:
            await asyncio.Event().wait()
        port = self._settings.metrics_port
        try:
            server = await asyncio.start_server(self._answer, _HOST, port, limit=_MAX_HEAD_BYTES)
        except OSError as exc:
            raise MetricsUnservable(f"no metrics on {_HOST} port {port}: {exc.strerror}") from exc
        async with server:
            log.info("metrics on %s port %d", *server.sockets[0].getsockname()[:2])
            await server.serve_forever()

    def text(self) -> bytes:
        """The page."""
        fields = {self._settings.served_model_name: self._meter.counts.fields}
        return page(list(counted_families(fields, Source.ENGINES)))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_HEAD_S):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    head = b""
                writer.write(b"".join(self._response(head)))
                await writer.drain()
        writer.close()

    def _response(self, head: bytes) -> Iterator[bytes]:
        is_ours = head.split(b"\r\n")[0].split(b" ")[:2] == [b"GET", b"/metrics"]
        body = self.text() if is_ours else b"only GET /metrics\n"
        status = b"200 OK" if is_ours else b"404 Not Found"
        kind = CONTENT_TYPE if is_ours else "text/plain"
        yield b"HTTP/1.1 " + status + b"\r\n"
        yield f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n".encode()
        yield b"Connection: close\r\n\r\n" + body
