"""How long running jobs may continue during a drain, and the notice that this machine will be
reclaimed, which begins one."""

import asyncio
import logging
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

_MAX_RESERVE_SHARE = 1 / 3  # of a short budget, kept for releasing jobs


class Drain:
    """A drain, begun by a signal, a spot notice or an order. Times are in seconds.

    Jobs that still run `release_s` before the end of the budget are released; with a short budget,
    after two thirds of it.
    """

    def __init__(
        self, budget_s: float, release_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.budget_s = budget_s
        self.reserve_s = min(release_s, budget_s * _MAX_RESERVE_SHARE)
        self.begun = asyncio.Event()
        self._clock_s = clock_s
        self._over_at_s = 0.0

    def begin(self) -> bool:
        """Begins the drain. Returns False if it has begun before; the budget is not extended."""
        if self.begun.is_set():
            return False
        self._over_at_s = self._clock_s() + self.budget_s
        self.begun.set()
        return True

    @property
    def running_s(self) -> float:
        """Time until running jobs are released."""
        return max(0.0, self.left_s - self.reserve_s)

    @property
    def left_s(self) -> float:
        """Time until the process must end; before the drain, the time reserved for releasing."""
        if not self.begun.is_set():
            return self.reserve_s
        return max(0.0, self._over_at_s - self._clock_s())


log = logging.getLogger(__name__)

POLL_S = 2.0  # EC2 recommends at most 5 s; it gives notice two minutes ahead
_ANSWER_TIMEOUT_S = 2.0
_MAX_ANSWER_BYTES = 4096
_TOKEN_PATH = "/latest/api/token"  # noqa: S105 - an address, no secret
_TOKEN_TTL_S = 21_600


class BadNoticeSource(ValueError):
    """The source is neither a path nor an http:// address."""


class SpotNotice:
    """Polls a file, or an HTTP address.

    There is a notice if the file exists, or if the address answers 200, as EC2's
    `http://169.254.169.254/latest/meta-data/spot/instance-action` does. If the address requires a
    session token (IMDSv2: status 401), one is requested from the same host. Raises BadNoticeSource.
    """

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
