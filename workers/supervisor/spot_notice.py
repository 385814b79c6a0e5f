"""Watches for the notice that this machine will be reclaimed: a file, or an HTTP address.

There is a notice if the file exists, or if the address answers 200, as EC2's
`http://169.254.169.254/latest/meta-data/spot/instance-action` does. If the address requires a
session token (IMDSv2: status 401), one is requested from the same host.
"""

import asyncio
import logging
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

POLL_S = 2.0  # EC2 recommends at most 5 s; it gives notice two minutes ahead
_ANSWER_TIMEOUT_S = 2.0
_MAX_ANSWER_BYTES = 4096
_TOKEN_PATH = "/latest/api/token"  # noqa: S105 - an address, no secret
_TOKEN_TTL_S = 21_600


class BadNoticeSource(ValueError):
    """The source is neither a path nor an http:// address."""


class SpotNotice:
    """Polls one source. Raises BadNoticeSource."""

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
        """Returns when there is a notice."""
        while not await self._is_there():  # noqa: ASYNC110 - a file sets no event
            await asyncio.sleep(self._poll_s)

    async def _is_there(self) -> bool:
        if self._path is not None:
            return self._path.exists()
        return await asyncio.to_thread(self._is_announced)

    def _is_announced(self) -> bool:
        status, _ = self._ask("GET", self._target, {"X-aws-ec2-metadata-token": self._token})
        if status == 401:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
            status, body = self._ask("PUT", _TOKEN_PATH, ttl)
            self._token = body.decode("ascii", "replace").strip() if status == 200 else ""
            token = {"X-aws-ec2-metadata-token": self._token}
            status, _ = self._ask("GET", self._target, token)
        return status == 200

    def _ask(self, method: str, target: str, headers: dict[str, str]) -> tuple[int, bytes]:
        """Status and body of one request; status 0 without an answer."""
        connection = HTTPConnection(self._host, self._port, timeout=_ANSWER_TIMEOUT_S)
        try:
            connection.request(method, target, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(_MAX_ANSWER_BYTES)
        except (OSError, HTTPException, ValueError) as exc:  # ValueError: not a valid header
            log.debug("no answer about a spot notice: %s", type(exc).__name__)
            return 0, b""
        finally:
            connection.close()
