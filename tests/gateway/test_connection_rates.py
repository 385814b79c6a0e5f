"""An address that opens connections without requests is cut off; no other is, and no honest one."""

import asyncio
import socket
from collections.abc import Iterator

import httpx
import pytest

from gateway.http import arrivals
from gateway.http.arrivals import Arrivals
from gateway.http.listener import AdmittingListener
from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.test_slow_clients import LIVEZ, connected, limits

pytestmark = pytest.mark.anyio

CREDIT = 48  # connections
LAST = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
SERVED, REFUSED, CUT_OFF = b"HTTP/1.1 200", b"HTTP/1.1 429", b""
# What a client may send that is no request.
FAILURES = {
    "half a head": LIVEZ[:20],
    "one byte": b"G",
    "no HTTP": b"\x16\x03\x01\x02\x00\r\n\r\n",
    "a malformed head": b"GET /livez HTTP/1.1\r\nhost localhost\r\n\r\n",
    "a head that is too long": b"GET /livez HTTP/1.1\r\nx: " + b"x" * 20_000,
}


@pytest.fixture
def url(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.URL]:
    """The URL of a gateway that gives little credit, which does not grow during a test."""
    monkeypatch.setattr(arrivals, "CREDIT", CREDIT)
    monkeypatch.setattr(arrivals, "PER_S", 1e-6)
    settings = make_settings(redis_server.url, max_connections_per_address=CREDIT)
    with limits(head_timeout_s=0.1), running_gateway(settings) as url:
        yield httpx.URL(url)


async def outcome(url: httpx.URL, source: str, raw: bytes = LAST) -> bytes:
    """The start of the answer to a new connection."""
    try:
        async with connected(url, source) as client:
            client.send(raw)
            return (await client.rest())[:12]
    except ConnectionError:
        return CUT_OFF


@pytest.mark.parametrize(("number", "raw"), list(enumerate(FAILURES.values(), 1)), ids=FAILURES)
async def test_failed_heads_use_up_an_addresss_credit(
    url: httpx.URL, number: int, raw: bytes
) -> None:
    """Whether the client leaves, or the gateway refuses or waits in vain. Then connections are
    answered 429, and then reset. Other addresses and earlier connections are served."""
    source = f"127.0.1.{number}"
    async with connected(url, source) as earlier:
        earlier.send(LIVEZ)
        assert (await earlier.answer()).startswith(SERVED)
        outcomes = [await outcome(url, source, raw) for _ in range(CREDIT // 16)]
        assert not {SERVED, REFUSED} & set(outcomes)
        outcomes = [await outcome(url, source) for _ in range(80)]
        # A reset may overtake the answer.
        assert set(outcomes) <= {REFUSED, CUT_OFF}
        assert outcomes[0] == REFUSED
        assert outcomes[-1] == CUT_OFF
        assert await outcome(url, f"127.0.2.{number}") == SERVED
        earlier.send(LIVEZ)
        assert (await earlier.answer()).startswith(SERVED)


async def test_connections_without_a_byte_use_it_up_slowly(url: httpx.URL) -> None:
    """One each, as of a load balancer that only connects."""
    for _ in range(CREDIT - 1):
        async with connected(url, "127.0.3.1"):
            pass
    assert await outcome(url, "127.0.3.1") == SERVED
    for _ in range(2):
        async with connected(url, "127.0.3.1"):
            pass
    assert await outcome(url, "127.0.3.1") == REFUSED


async def test_whole_requests_give_credit_back(url: httpx.URL) -> None:
    """A client without keep-alive may open three times as many connections here; on the way as many
    as it may have are open at once. A 404 is a whole request, and so is one on each connection."""
    for raw in (LAST, LAST.replace(b"livez", b"nothing"), LIVEZ + LAST):
        for _ in range(CREDIT):
            assert (await outcome(url, "127.0.3.2", raw)).startswith(b"HTTP/1.1 ")
    calls = (outcome(url, "127.0.3.3") for _ in range(CREDIT))
    assert await asyncio.gather(*calls) == [SERVED] * CREDIT


async def test_without_a_limit_there_is_no_rate(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a proxy, which all clients have as their address."""
    monkeypatch.setattr(arrivals, "CREDIT", CREDIT)
    with running_gateway(make_settings(redis_server.url, max_connections_per_address=0)) as url:
        for _ in range(2 * CREDIT):
            async with connected(httpx.URL(url), "127.0.3.4") as client:
                client.send(b"G")
        assert await outcome(httpx.URL(url), "127.0.3.4") == SERVED


def test_by_default_the_credit_is_far_from_honest_clients() -> None:
    """As many as may be open at once, and 500 whole requests each second."""
    most = GatewaySettings.model_fields["max_connections_per_address"].default
    assert arrivals.CREDIT >= most >= 1_024
    assert arrivals.PER_S / (1 - arrivals.WHOLE) >= 500


def test_credit_grows_with_time_up_to_its_bound() -> None:
    """Debt has a bound too, so an address is served again soon after an attack."""
    now_s = 0.0
    credit = Arrivals(2_000, lambda: now_s)
    assert credit.take("a", 30) == 1_970
    assert credit.take("a", -90) == 2_000
    assert credit.take("a", 10_000) == -arrivals.ANSWERED
    now_s += 1
    assert credit.take("a") == arrivals.PER_S - arrivals.ANSWERED
    now_s += 3_600
    assert credit.take("a", 1) == 1_999


def test_addresses_that_are_remembered_have_a_bound() -> None:
    """An attacker may have a network of 65,536 networks. The one seen last is not forgotten."""
    credit = Arrivals(1, lambda: 0.0)
    for number in range(3 * arrivals.MAX_NETWORKS):
        credit.take(f"2001:db8:{number:x}::/64", 100)
        assert credit.take("attacker", 1) <= max(-arrivals.ANSWERED, arrivals.CREDIT - 1 - number)
    assert len(credit._left) == arrivals.MAX_NETWORKS


async def test_a_refused_connection_makes_no_protocol_and_no_task() -> None:
    """It is reset as soon as it is accepted, and of a thousand that wait a few in each round of
    the loop."""

    def protocol() -> asyncio.Protocol:
        raise AssertionError("it was admitted")

    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        sockets = [socket.create_connection(listener.getsockname()) for _ in range(40)]
        asked = list[str]()

        def admits(address: tuple[str, int]) -> bool:
            asked.append(address[0])
            return False

        admitting = AdmittingListener(listener, admits)
        rounds = 0
        loop = asyncio.get_running_loop()
        server = await loop.create_server(protocol, sock=admitting)
        while len(asked) < 40:
            rounds += 1
            await asyncio.sleep(0)
        server.close()
        assert rounds >= 3
        assert asked == ["127.0.0.1"] * 40
        for client in sockets:
            with client, pytest.raises(ConnectionResetError):
                client.recv(1)
