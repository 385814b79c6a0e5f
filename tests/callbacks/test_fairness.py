"""Tenants share the places of deliveries, however many destinations each of them names."""

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from typing import Any

import pytest
import redis.asyncio

from contract.functions import Functions
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.callbacks.receiver import Answer, Receiver, always
from tests.callbacks.test_delivery import service, to_url
from tests.contract.some_calls import make_job, make_submission
from tests.fleet import until

pytestmark = pytest.mark.anyio

NUM_PLACES = 32
MOST_OF_ONE = 25  # of these places, held by a tenant alone
FOREVER_S = 600.0


class SilentServers:
    """Servers that take connections and messages, and answer nothing, or byte by byte without end,
    until they are released. Counts the connections of each tenant."""

    def __init__(self, trickles: bool = False) -> None:
        self._trickles = trickles
        self._released = asyncio.Event()
        self._servers = contextlib.AsyncExitStack()
        self.num_open: Counter[str] = Counter()
        self.most_open: Counter[str] = Counter()

    async def __aenter__(self) -> "SilentServers":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()
        await self._servers.aclose()

    def release(self) -> None:
        self._released.set()

    async def url(self, tenant: str) -> str:
        """The address of one more server."""

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.num_open[tenant] += 1
            self.most_open[tenant] = max(self.most_open[tenant], self.num_open[tenant])
            with contextlib.suppress(ConnectionError):
                await self._answer(writer)
            self.num_open[tenant] -= 1
            writer.close()

        server = await asyncio.start_server(hold, "127.0.0.1", 0)
        self._servers.callback(server.close)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        if self._trickles:
            writer.write(b"HTTP/1.1 200 X\r\nx: ")
        while not self._released.is_set():
            if self._trickles:
                writer.write(b"x")
                await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05 if self._trickles else FOREVER_S):
                    await self._released.wait()


async def post(functions: Functions, tenant: str, url: str, number: int = 1) -> None:
    """Messages of jobs that their caller cancels."""
    for _ in range(number):
        job = make_job(tenant)
        await functions.submit(job, make_submission(callback=to_url(url)))
        await functions.cancel(job.id, tenant)


def working_receiver() -> Receiver:
    return Receiver({"/": always(Answer())})


@pytest.mark.parametrize(
    ("num_tenants", "num_servers", "trickles"),
    [(1, 96, False), (1, 96, True), (3, 32, False), (12, 8, True), (1, 1, False)],
)
@pytest.mark.each_value
async def test_silent_servers_of_some_tenants_delay_no_other_tenant(
    functions: Functions,
    redis_server: EmbeddedRedis,
    num_tenants: int,
    num_servers: int,
    trickles: bool,
) -> None:
    """They hold their places for the whole test. Each has three messages waiting, and no tenant
    holds more than its share; another tenant's forty messages are all delivered meanwhile."""
    tenants = [f"silent{number}" for number in range(num_tenants)]
    async with SilentServers(trickles) as servers, working_receiver() as receiver:
        for tenant in tenants:
            for _ in range(num_servers):
                await post(functions, tenant, await servers.url(tenant), 3)
        async with service(redis_server, max_concurrent=NUM_PLACES, timeout_s=FOREVER_S):
            wanted = min(3 * num_servers, 20)

            async def are_held() -> bool:
                return servers.num_open.total() >= wanted

            await until(are_held)
            await post(functions, "other", receiver.url("/"), 40)
            await receiver.until(lambda: len(receiver.accepted()) == 40)
            assert servers.num_open.total() >= wanted, "the silent ones were not served out"
            assert servers.most_open.total() < NUM_PLACES
            assert max(servers.most_open.values()) <= MOST_OF_ONE
            if num_tenants > 1:
                assert max(servers.most_open.values()) <= 2 * NUM_PLACES / num_tenants
            servers.release()


async def test_refused_connections_delay_no_other_tenant(
    functions: Functions, redis_server: EmbeddedRedis
) -> None:
    """Their messages are tried again without end, several times in a second."""
    async with working_receiver() as receiver:
        with contextlib.ExitStack() as ports:
            for _ in range(96):
                port = ports.enter_context(socket.socket())
                port.bind(("127.0.0.1", 0))  # without `listen` it refuses connections
                await post(functions, "refused", f"http://127.0.0.1:{port.getsockname()[1]}/")
            async with service(redis_server, max_concurrent=4, retry_delays_s=(0.01,) * 10_000):

                async def are_tried() -> bool:
                    return (await functions.snapshot("m", [])).deliveries.get("retry", 0) > 96

                await until(are_tried)
                await post(functions, "other", receiver.url("/"), 20)
                await receiver.until(lambda: len(receiver.accepted()) == 20)


async def test_names_that_are_never_resolved_delay_no_other_tenant(
    functions: Functions, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's resolver blocks a thread for each name, beyond the time of the attempt. The
    threads of one tenant are never more than its places."""
    released, lock, blocked, most = threading.Event(), threading.Lock(), 0, 0
    system = socket.getaddrinfo

    def resolve(host: str, *args: object, **options: object) -> object:
        nonlocal blocked, most
        if not str(host).startswith("slow"):
            return system(host, *args, **options)  # type: ignore[arg-type]
        with lock:
            blocked, most = blocked + 1, max(most, blocked + 1)
        released.wait()
        with lock:
            blocked -= 1
        raise socket.gaierror("not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)  # no name server can be had in a test
    for number in range(96):
        await post(functions, "slow", f"https://slow{number}.example/")
    async with (
        working_receiver() as receiver,
        service(redis_server, max_concurrent=NUM_PLACES, timeout_s=0.2),
    ):
        try:

            async def are_blocked() -> bool:
                return blocked >= 20

            await until(are_blocked)
            await post(functions, "other", receiver.url("/"), 40)
            await receiver.until(lambda: len(receiver.accepted()) == 40)
            assert most <= MOST_OF_ONE
        finally:
            released.set()


async def test_destinations_of_an_earlier_version_are_adopted(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys, redis_server: EmbeddedRedis
) -> None:
    """Messages that waited when the functions were replaced are delivered: destinations were
    scheduled without their tenants."""
    async with working_receiver() as receiver:
        await post(functions, "t", receiver.url("/"), 3)
        rows: Any = await redis_client.zrange(keys.of("due", "of", "t"), 0, -1, withscores=True)
        await redis_client.delete(keys.of("outbox"), keys.of("due", "of", "t"))
        await redis_client.zadd(keys.of("outbox"), dict(rows))
        async with service(redis_server):
            await receiver.until(lambda: len(receiver.accepted()) == 3)
