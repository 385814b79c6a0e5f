"""Clients that send a byte per second, or nothing, are closed, and others are served."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest

from contract.connection import end_tasks
from gateway.http.arrivals import network_of
from gateway.server import allow_many_files, build_server
from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import Gateways, make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = pytest.mark.anyio

FIRST_S, IDLE_S, HEAD_S, BODY_S = 0.6, 2.5, 0.8, 0.8
OWN, PER_ADDRESS = "127.0.0.7", 8
KEY = "a-key-of-the-operator"
CALL: dict[str, Any] = {"model": MODEL, "prompt": "ab", "max_tokens": 20}
LIVEZ = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 4000\r\n\r\n"
)


@contextmanager
def limits(**values: float) -> Iterator[None]:
    """Limits that are no settings."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(GatewaySettings, name, value)
        yield


@pytest.fixture(scope="module")
def url(redis_server: EmbeddedRedis) -> Iterator[httpx.URL]:
    """The URL of a gateway with short deadlines and unlimited connections."""
    allow_many_files()
    settings = make_settings(redis_server.url, idle_timeout_s=IDLE_S, max_connections_per_address=0)
    timeouts = {"first_timeout_s": FIRST_S, "head_timeout_s": HEAD_S, "body_timeout_s": BODY_S}
    with limits(**timeouts), running_gateway(settings) as url:
        yield httpx.URL(url)


@pytest.fixture(scope="module")
def capped_url(redis_server: EmbeddedRedis) -> Iterator[httpx.URL]:
    """The URL of a gateway that limits connections per address."""
    settings = make_settings(redis_server.url, max_connections_per_address=PER_ADDRESS)
    with running_gateway(settings) as url:
        yield httpx.URL(url)


class Client:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._is_answered = False

    def send(self, raw: bytes) -> None:
        self._writer.write(raw)

    async def drip(self, raw: bytes, every_s: float) -> bytes:
        """Sends byte by byte until the gateway closes; returns what it sent."""

        async def send() -> None:
            for byte in itertools.cycle(raw):
                if self._is_answered:
                    return  # a reset after another byte would discard the response
                self._writer.write(bytes([byte]))
                await asyncio.sleep(every_s)

        sending = asyncio.create_task(send())
        try:
            return await self.rest()
        finally:
            await end_tasks(sending)

    async def answer(self) -> bytes:
        """A probe's response, up to the end of its body."""
        return await self._reader.readuntil(b'"alive"}')

    async def rest(self) -> bytes:
        """Reads until the gateway closes the connection."""
        parts = []
        try:
            while part := await self._reader.read(65_536):
                self._is_answered = True
                parts.append(part)
        except ConnectionResetError:
            pass
        return b"".join(parts)


@asynccontextmanager
async def connected(url: httpx.URL, source: str = "127.0.0.1") -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(url.host, url.port, local_addr=(source, 0))
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("at_once", "slowly", "every_s", "answer"),
    [
        (b"", b"", 0.0, b""),
        (b"", b"GET /livez HTTP/1.1\r\nx-more: ", HEAD_S / 10, b""),
        (HEAD, b" ", BODY_S / 10, b"HTTP/1.1 408 "),
        # The response does not need the body, whose rest does not keep the connection open.
        (HEAD.replace(b"/v1/completions", b"/livez"), b" ", IDLE_S / 10, b"HTTP/1.1 405 "),
    ],
    ids=["nothing", "a head", "a body", "the rest of a rejected body"],
)
async def test_what_comes_at_a_byte_a_second_is_closed(
    url: httpx.URL, at_once: bytes, slowly: bytes, every_s: float, answer: bytes
) -> None:
    """Each byte is in time, but the whole is not."""
    async with connected(url) as client:
        client.send(at_once)
        received = await client.drip(slowly, every_s)
    assert received.startswith(answer)
    assert bool(received) == bool(answer)
    assert (b'"body_too_slow"' in received) == (b" 408 " in answer)


async def test_an_idle_connection_is_closed(url: httpx.URL) -> None:
    """A used connection serves on; an idle one is closed, long after one that was never used."""
    async with connected(url) as client:
        client.send(LIVEZ)
        assert (await client.answer()).startswith(b"HTTP/1.1 200 ")
        async with connected(url) as unused:
            assert await unused.rest() == b""
        client.send(LIVEZ)
        assert (await client.answer()).startswith(b"HTTP/1.1 200 ")
        assert await client.rest() == b""


def test_idle_connections_are_kept_longer_than_balancers_keep_them() -> None:
    """nginx and the Application Load Balancer: 60 s. What was never used is closed earlier."""
    settings = GatewaySettings(redis_url="redis://x")
    assert settings.first_timeout_s < 60 < settings.idle_timeout_s
    config = build_server(settings).config
    assert config.timeout_keep_alive >= settings.idle_timeout_s


async def test_pipelined_requests_are_answered_before_the_wait_begins(url: httpx.URL) -> None:
    """Also if the head of another request follows and never ends."""
    async with connected(url) as client:
        client.send(LIVEZ * 3 + LIVEZ[:10])
        assert (await client.rest()).count(b'"alive"') == 3


async def test_a_response_may_take_longer_than_every_client_timeout(
    idle_worker: FakeWorker, url: httpx.URL
) -> None:
    """A long call is no idle connection."""
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        call = asyncio.create_task(http.post("/v1/completions", json=CALL))
        claiming = asyncio.create_task(idle_worker.claim())
        await asyncio.wait([call, claiming], return_when=asyncio.FIRST_COMPLETED)
        assert claiming.done(), call.result().text
        async with connected(url) as idle:
            idle.send(LIVEZ)
            await idle.answer()
            assert await idle.rest() == b""  # the whole timeout has passed
        await idle_worker.run(claiming.result())
        assert (await call).status_code == 200


@pytest.mark.campaign
async def test_five_hundred_slow_clients_do_not_keep_others_from_being_served(
    worker: FakeWorker, redis_server: EmbeddedRedis
) -> None:
    """A third sends nothing, a third a slow head and a third a slow body. All are closed;
    concurrent calls are answered."""
    allow_many_files()
    settings = make_settings(redis_server.url, idle_timeout_s=4.0)
    with limits(head_timeout_s=4.0, body_timeout_s=4.0), running_gateway(settings) as url:
        await besiege(httpx.URL(url))


async def besiege(url: httpx.URL) -> None:
    """500 clients from 50 addresses, connected before the first call is made."""
    num_connected, all_there = itertools.count(1), asyncio.Event()

    async def dawdle(number: int) -> bytes:
        async with connected(url, f"127.0.0.{2 + number % 50}") as client:
            if next(num_connected) == 500:
                all_there.set()
            if number % 3 == 0:
                return await client.rest()
            if number % 3 == 1:
                return await client.drip(HEAD[:-2], 0.25)
            client.send(HEAD)
            return await client.drip(b" ", 0.25)

    slow = [asyncio.create_task(dawdle(number)) for number in range(500)]
    served = 0
    await all_there.wait()
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        while not all(task.done() for task in slow):
            answer = await http.post("/v1/completions", json=CALL)
            assert answer.status_code == 200, answer.text
            served += 1
    received = [task.result() for task in slow]
    assert served >= 1
    assert all(words == b"" for number, words in enumerate(received) if number % 3 != 2)
    assert all(words.startswith(b"HTTP/1.1 408 ") for words in received[2::3])


async def test_connections_per_address_are_limited(capped_url: httpx.URL) -> None:
    """One more is answered 429 and closed. Other addresses have their own limit, and a closed
    connection makes room."""
    async with AsyncExitStack() as kept, AsyncExitStack() as closed:
        places = [kept] * (PER_ADDRESS - 1) + [closed]
        clients = [await each.enter_async_context(connected(capped_url, OWN)) for each in places]
        for client in clients:
            client.send(LIVEZ)
            await client.answer()
        async with connected(capped_url, OWN) as one_more:
            one_more.send(LIVEZ)
            refusal = await one_more.rest()
        assert refusal.startswith(b"HTTP/1.1 429 ")
        assert b'"too_many_connections"' in refusal
        assert b"\r\nretry-after: 1\r\n" in refusal
        async with connected(capped_url, "127.0.0.8") as elsewhere:
            elsewhere.send(LIVEZ)
            assert (await elsewhere.answer()).startswith(b"HTTP/1.1 200 ")
        await closed.aclose()
        await eventually_served(capped_url, OWN)
        clients[0].send(LIVEZ)
        assert (await clients[0].answer()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a-socket", "a-socket"),
    ],
)
def test_an_ipv6_network_counts_as_one_address(address: str, counted: str) -> None:
    """An IPv6 client usually has a whole network of addresses."""
    assert network_of(address) == counted


async def eventually_served(url: httpx.URL, source: str) -> None:
    """Retries until the gateway has noticed that a connection is closed."""
    while True:
        async with connected(url, source) as client:
            client.send(LIVEZ + b"GET /nothing HTTP/1.1\r\nconnection: close\r\n\r\n")
            if (await client.rest()).startswith(b"HTTP/1.1 200 "):
                return


async def test_concurrent_calls_per_key_are_limited(
    idle_worker: FakeWorker, gateways: Gateways
) -> None:
    """429 beyond the limit, until a response is complete or its reader has disconnected. Probes
    do not count."""
    with limits(max_calls_per_key=2):
        async with gateways(api_key=KEY) as http:
            http.headers["authorization"] = f"Bearer {KEY}"
            whole = asyncio.create_task(http.post("/v1/completions", json=CALL))
            claimed = await idle_worker.claim()
            async with http.stream("POST", "/v1/completions", json=CALL | {"stream": True}) as left:
                assert left.status_code == 200
                refused = await http.get("/v1/models")
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "too_many_calls"
                assert refused.headers["x-dropped-reason"] == "tenant_quota"
                assert int(refused.headers["retry-after"]) >= 1
                assert (await http.get("/livez")).status_code == 200
                second = await idle_worker.claim()
            await idle_worker.run(claimed)
            assert (await whole).status_code == 200
            await idle_worker.wait_until_ended(second)  # the gateway saw its reader leave
            models = [http.get("/v1/models") for _ in range(2)]
            statuses = [answer.status_code for answer in await asyncio.gather(*models)]
    assert statuses == [200, 200]
