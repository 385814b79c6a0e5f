"""Spares callers the wait for a Redis that is known to be down."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from contract.errors import BrokerFull, BrokerUnavailable, BrokerUnfit, CommandDenied


class Breaker:
    """Closed until a call fails; then open for a while, then one call at a time may try."""

    def __init__(self, open_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._open_s = open_s
        self._clock_s = clock_s
        self._open_until_s: float | None = None
        self._is_probing = False

    def check(self) -> None:
        """Raises BrokerUnavailable at once where a call would not be let through."""
        if self._open_until_s is not None and (
            self._is_probing or self._clock_s() < self._open_until_s
        ):
            raise BrokerUnavailable("Redis did not answer a moment ago")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around one call. Raises BrokerUnavailable at once while open."""
        self.check()
        is_probe = self._is_probing = self._open_until_s is not None
        try:
            yield
        except (BrokerFull, BrokerUnfit, CommandDenied):
            self._open_until_s = None  # it answers
            raise
        except BrokerUnavailable:
            self._open_until_s = self._clock_s() + self._open_s
            raise
        else:
            self._open_until_s = None
        finally:
            if is_probe:
                self._is_probing = False
