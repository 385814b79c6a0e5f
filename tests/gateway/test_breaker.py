"""What a gateway logs while Redis does not answer."""

import logging

import pytest

from contract.errors import BrokerUnavailable
from gateway.redis.shards import Breaker


def fail(breaker: Breaker) -> None:
    with pytest.raises(BrokerUnavailable), breaker.guard():
        raise BrokerUnavailable("refused")


def test_an_outage_is_logged_at_its_begin_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """Not at each call between them."""
    times_s = [0.0]
    breaker = Breaker(0.5, lambda: times_s[-1])
    with caplog.at_level(logging.INFO):
        for second in range(100):
            times_s.append(float(second))
            fail(breaker)
        times_s.append(101.0)
        with breaker.guard():
            pass
        fail(breaker)
    absent, back = "no answer from Redis: refused", "Redis answers again after 101 s"
    assert caplog.messages == [absent, back, absent]
