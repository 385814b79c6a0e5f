"""What a gateway logs while Redis does not answer."""

import logging

import pytest

from contract.errors import BrokerUnavailable
from gateway.redis.breaker import Breaker


def fail(breaker: Breaker) -> None:
    with pytest.raises(BrokerUnavailable), breaker.guard():
        raise BrokerUnavailable("refused")


def test_an_outage_is_logged_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    """After 0, 1, 3, 7 … s, and when Redis answers again."""
    times_s = [0.0]
    breaker = Breaker(0.5, lambda: times_s[-1])
    with caplog.at_level(logging.INFO):
        for second in range(100):
            times_s.append(float(second))
            fail(breaker)
        times_s.append(101.0)
        with breaker.guard():
            pass
    assert [record.args[0] for record in caplog.records[:-1]] == [0, 1, 3, 7, 15, 31, 63]  # type: ignore[index]
    assert caplog.messages[-1] == "Redis answers again after 101 s"
    with caplog.at_level(logging.INFO):
        fail(breaker)
    assert caplog.messages[-1].startswith("no answer from Redis for 0 s")
