"""Watches for the notice that this machine will be taken away: a file, or an address on HTTP.

A file is a notice once it is there. An address is one while it answers 200, as EC2's
`http://169.254.169.254/latest/meta-data/spot/instance-action` does; 404, and any other answer or
none, is no notice. Where it wants a session token (IMDSv2: 401) one is fetched from the same host.
"""

import asyncio
import logging
from pathlib import Path
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

POLL_S = 2.0  # EC2 asks for 5 s or less, of the two minutes that it gives
_ANSWER_TIMEOUT_S = 2.0
_MAX_ANSWER_BYTES = 4096
_TOKEN_PATH = "/latest/api/token"  # noqa: S105 - an address, no secret
_TOKEN_TTL_S = 21_600


class BadNoticeSource(ValueError):
    """Neither a path nor an address that can be watched."""


class SpotNotice:
    """One source, polled. Raises BadNoticeSource."""

    def __init__(self, source: str, poll_s: float = POLL_S) -> None:
        self._poll_s = poll_s
        self._path: Path | None = None
        self._token = ""
        scheme = urlsplit(source).scheme
        if scheme == "http":
            parts = urlsplit(source)
            if parts.hostname is None:
                raise BadNoticeSource(f"a spot notice's address names a host, unlike {source!r}")
            self._host, self._port = parts.hostname, parts.port or 80
            self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        elif scheme:
            raise BadNoticeSource(f"a spot notice is a path or begins with http://, not {source!r}")
        else:
            self._path = Path(source)

    async def wait(self) -> None:
        """Returns once there is a notice."""
        while not await self._is_there():  # noqa: ASYNC110 - nobody here sets an event
            await asyncio.sleep(self._poll_s)

    async def _is_there(self) -> bool:
        if self._path is not None:
            return self._path.exists()
        status, _ = await self._ask("GET", self._target, {"X-aws-ec2-metadata-token": self._token})
        if status == 401:
            await self._fetch_token()
            status, _ = await self._ask(
                "GET", self._target, {"X-aws-ec2-metadata-token": self._token}
            )
        return status == 200

    async def _fetch_token(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
        status, body = await self._ask("PUT", _TOKEN_PATH, headers)
        self._token = body.decode("ascii", "replace").strip() if status == 200 else ""

    async def _ask(self, method: str, target: str, headers: dict[str, str]) -> tuple[int, bytes]:
        """Status and body of one request; 0 where there is no answer."""
        lines = [f"{method} {target} HTTP/1.0", f"Host: {self._host}:{self._port}"]
        lines += [f"{name}: {value}" for name, value in headers.items() if value]
        lines += ["Content-Length: 0"] if method == "PUT" else []
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
                    answer = await reader.read(_MAX_ANSWER_BYTES)
                    while more := await reader.read(_MAX_ANSWER_BYTES):
                        if len(answer) < _MAX_ANSWER_BYTES:
                            answer += more
                finally:
                    writer.close()
        except (OSError, TimeoutError) as exc:
            log.debug("no answer about a spot notice: %s", type(exc).__name__)
            return 0, b""
        head, _, body = answer.partition(b"\r\n\r\n")
        words = head.split(b"\r\n", 1)[0].split()
        return (int(words[1]) if len(words) > 1 and words[1].isdigit() else 0), body
