"""Spares callers the wait for a Redis that is known to be down."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from contract.errors import BrokerFull, BrokerUnavailable

OPEN_S = 1.0


class Breaker:
    """Closed until a call fails; then open for a second, then one call at a time may try."""

    def __init__(
        self, open_s: float = OPEN_S, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._open_s = open_s
        self._clock_s = clock_s
        self._open_until_s: float | None = None
        self._is_probing = False

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around one call. Raises BrokerUnavailable at once while open."""
        is_probe = self._open_until_s is not None
        if is_probe:
            assert self._open_until_s is not None
            if self._is_probing or self._clock_s() < self._open_until_s:
                raise BrokerUnavailable("Redis did not answer a moment ago")
            self._is_probing = True
        try:
            yield
        except BrokerFull:
            self._open_until_s = None  # it answers, and can be read
            raise
        except BrokerUnavailable:
            self._open_until_s = self._clock_s() + self._open_s
            raise
        else:
            self._open_until_s = None
        finally:
            if is_probe:
                self._is_probing = False
