"""A circuit breaker: while Redis is down, calls fail at once."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from contract.errors import BrokerFull, BrokerUnavailable, BrokerUnfit, CommandDenied

log = logging.getLogger("batchway.gateway")

_MAX_SILENCE_S = 60.0


class Breaker:
    """Opens when a call fails. After a while, one call at a time may try."""

    def __init__(self, open_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._open_s = open_s
        self._clock_s = clock_s
        self._open_until_s: float | None = None
        self._is_probing = False
        self._away_since_s: float | None = None
        self._say_again_s = 0.0  # no call before this time
        self._silence_s = 1.0

    def check(self) -> None:
        """Raises BrokerUnavailable if a call would be rejected."""
        if self._open_until_s is not None and (
            self._is_probing or self._clock_s() < self._open_until_s
        ):
            raise BrokerUnavailable("Redis did not answer a moment ago")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Surrounds one call. Raises BrokerUnavailable at once while open."""
        self.check()
        is_probe = self._is_probing = self._open_until_s is not None
        try:
            yield
        except (BrokerFull, BrokerUnfit, CommandDenied):
            self._note_answer()
            raise
        except BrokerUnavailable as exc:
            self._open_until_s = self._clock_s() + self._open_s
            self._note_absence(exc)
            raise
        else:
            self._note_answer()
        finally:
            if is_probe:
                self._is_probing = False

    def _note_absence(self, exc: BrokerUnavailable) -> None:
        """Logs the outage after 1 s, then at intervals that double up to a minute."""
        now_s = self._clock_s()
        if self._away_since_s is None:
            self._away_since_s, self._say_again_s, self._silence_s = now_s, now_s, 1.0
        if now_s >= self._say_again_s:
            log.warning("no answer from Redis for %.0f s: %s", now_s - self._away_since_s, exc)
            self._say_again_s = now_s + self._silence_s
            self._silence_s = min(2 * self._silence_s, _MAX_SILENCE_S)

    def _note_answer(self) -> None:
        self._open_until_s = None
        if self._away_since_s is not None:
            log.info("Redis answers again after %.0f s", self._clock_s() - self._away_since_s)
            self._away_since_s = None
