"""No callback reaches a private address, whatever its URL is or its name server answers."""

import ssl
import sys
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from typing import Any

import pytest

from contract.callback_urls import AllowList, BadCallbackUrl, parse_callback_url, why_blocked
from tests.callbacks.hostile_urls import PRIVATE_ANSWERS, hostile_urls
from workers.callbacks.retries import Delivered, DeliveryFailed, DeliveryRefused
from workers.callbacks.webhook import AddressGuard, BlockedAddress, WebhookSender

pytestmark = pytest.mark.anyio

NOBODY = AllowList()
PUBLIC = "203.1.112.10"  # never reached: `Connections` stops the connection


class Connections:
    """Records every address that this process connects to while it watches."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.is_watching = False
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_watching and event == "socket.connect" and isinstance(arguments[1], tuple):
            self.addresses.append(arguments[1][0])
            raise ConnectionRefusedError("no connection leaves this test")


_CONNECTIONS = Connections()  # one only, because audit hooks cannot be removed


@pytest.fixture
def connections() -> Iterator[Connections]:
    _CONNECTIONS.addresses.clear()
    _CONNECTIONS.is_watching = True
    yield _CONNECTIONS
    _CONNECTIONS.is_watching = False


class NameServer:
    """Gives the answers in turn, and repeats the last one."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.num_asked = 0

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.num_asked += 1
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def sender(names: NameServer, allow: AllowList = NOBODY) -> WebhookSender:
    guard = AddressGuard(allow, names.resolve)
    return WebhookSender(allow, guard, timeout_s=5.0, tls=ssl.create_default_context())


async def test_no_hostile_url_makes_a_connection(connections: Connections) -> None:
    """More than two hundred URLs, with a name server that answers 127.0.0.1."""
    urls = list(hostile_urls())
    assert len(urls) >= 200
    names = NameServer(["127.0.0.1"])
    webhooks = sender(names)
    for url in urls:
        assert isinstance(await webhooks.send(url, b"{}", {}), DeliveryRefused), url
    await webhooks.aclose()
    assert connections.addresses == []


@pytest.mark.parametrize("answer", PRIVATE_ANSWERS)
async def test_private_answers_of_a_name_server_are_blocked(
    connections: Connections, answer: str
) -> None:
    """Alone, or beside a public address."""
    for answers in ([answer], [PUBLIC, answer], [answer, PUBLIC]):
        webhooks = sender(NameServer(answers))
        outcome = await webhooks.send("https://example.com/", b"{}", {})
        await webhooks.aclose()
        assert isinstance(outcome, DeliveryRefused)
        assert "not public" in outcome.note
    assert connections.addresses == []


async def test_a_rebinding_name_server_is_asked_once(connections: Connections) -> None:
    """The connection uses the checked address."""
    names = NameServer([PUBLIC], ["127.0.0.1"])
    webhooks = sender(names)
    outcome = await webhooks.send("https://rebind.example/", b"{}", {})
    await webhooks.aclose()
    assert isinstance(outcome, DeliveryFailed)
    assert connections.addresses == [PUBLIC]
    assert names.num_asked == 1


async def test_the_hook_sees_connections(connections: Connections) -> None:
    """The other tests rely on it."""
    webhooks = sender(NameServer(["127.0.0.1"]), AllowList.parse(["127.0.0.1"]))
    assert not isinstance(await webhooks.send("http://127.0.0.1:9/", b"{}", {}), Delivered)
    await webhooks.aclose()
    assert connections.addresses == ["127.0.0.1"]


async def test_proxies_of_the_environment_are_not_used(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy would resolve the name again."""
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    webhooks = sender(NameServer([PUBLIC]))
    await webhooks.send("https://example.com/", b"{}", {})
    await webhooks.aclose()
    assert connections.addresses == [PUBLIC]


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "2002:808:808::1", "192.0.1.1"],
)
def test_public_addresses_are_allowed(address: str) -> None:
    """Also in IPv6-only networks, which reach IPv4 through NAT64."""
    assert why_blocked(ip_address(address)) is None


def test_operators_may_allow_private_targets() -> None:
    """By network or by name. Those need no TLS; others stay blocked."""
    allow = AllowList.parse(["127.0.0.0/8", "receiver", "fd00::/8"])
    for url in (
        "http://127.0.0.1:9/",
        "http://localhost/",
        "http://receiver/x",
        "https://[fd00::1]/",
    ):
        assert parse_callback_url(url, allow).target.startswith("/")
    for url in ("http://10.0.0.1/", "https://other/", "http://example.com/"):
        with pytest.raises(BadCallbackUrl):
            parse_callback_url(url, allow)
    with pytest.raises(ValueError, match="0x7f"):
        AllowList.parse(["0x7f.1"])


async def test_an_allowed_name_may_have_any_address() -> None:
    """Because containers have varying addresses. Other names stay blocked."""
    allow = AllowList.parse(["receiver"])
    guard = AddressGuard(allow, NameServer(["10.0.0.7"]).resolve)
    assert await guard.addresses(parse_callback_url("http://receiver:80/", allow)) == ["10.0.0.7"]
    with pytest.raises(BlockedAddress):
        await guard.addresses(parse_callback_url("https://example.com/", allow))


def test_a_url_is_parsed() -> None:
    """The host in lower case, the port of the scheme, path and query unchanged."""
    url = parse_callback_url("HTTPS://Example.COM/a%2Fb?c=d&e=%20", NOBODY)
    assert (url.scheme, url.host, url.port) == ("https", "example.com", 443)
    assert (url.target, url.host_header) == ("/a%2Fb?c=d&e=%20", "example.com")
    other = parse_callback_url("https://[2606:4700::1111]:8443?x", NOBODY)
    assert (other.target, other.host_header) == ("/?x", "[2606:4700::1111]:8443")
