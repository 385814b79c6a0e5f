"""Workers and gateways as processes on their own Redis, with access to its state."""

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Any

import httpx
import redis
import redis.asyncio

from contract.connection import connect
from contract.functions import Functions
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions
from tests.fleet import Caller, Program, WorkerProcess, fleet, until
from tests.infra.stack import running_stack_without_settings
from tests.oracle.audit import Audit

MODEL = "m"
_RETENTION_VARIABLES = ("BATCHWAY_SYNC_RETENTION_S", "BATCHWAY_JOB_RETENTION_S")
_PLACES_OF_OPEN_JOBS = ("leases", "deadlines", "attended", "own:*", "q:*", "back:*", "alone:*")
RETENTION_S = 86_400.0  # nothing is forgotten before it has been checked
_REST_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Pool:
    """`caller` sends commands to Redis, as gateways and tests do."""

    server: EmbeddedRedis
    caller: Caller
    workers: list[WorkerProcess]
    urls: list[str]  # of the gateways

    @property
    def url(self) -> str:
        """Of the only gateway."""
        [url] = self.urls
        return url

    async def infos(self) -> list[dict[str, Any]]:
        """The contents of each worker's next heartbeat."""
        now_ms = await self._now_ms()
        keys, client = self.caller.keys, self.caller.client

        async def all_have_beaten() -> bool:
            beats: Any = await client.zrange(keys.of("workers", MODEL), 0, -1, withscores=True)
            return all(at_ms > now_ms for _, at_ms in beats)

        await until(all_have_beaten)
        return await self.caller.worker_info()

    async def until_at_rest(self) -> list[dict[str, Any]]:
        """Returns the workers' reports once none holds or runs anything and all blocks are free.

        Raises TimeoutError if a job does not stop.
        """
        infos: list[dict[str, Any]] = []

        async def is_at_rest() -> bool:
            infos[:] = await self.infos()
            return bool(infos) and all(map(_is_idle, infos))

        await until(is_at_rest, _REST_TIMEOUT_S)
        return infos

    def audit(self) -> list[str]:
        """A sentence for each job that has not ended, each violated invariant of the protocol, and
        each ended job that is still in a queue, held by a worker or scheduled."""
        tag = self.caller.keys.tag
        with redis.Redis.from_url(self.server.url) as client:
            try:
                Audit(client, self.caller.keys).check_all_ended()
            except AssertionError as exc:
                return [f"the audit of Redis: {exc}"]
            found: Any = [client.keys(f"{tag}:{pattern}") for pattern in _PLACES_OF_OPEN_JOBS]
        return [f"{key.decode()} is left" for keys in found for key in keys]

    async def _now_ms(self) -> int:
        seconds, microseconds = await self.caller.client.time()
        return int(seconds) * 1000 + int(microseconds) // 1000


def _is_idle(info: Mapping[str, Any]) -> bool:
    counts = ("jobs_held", "num_running", "num_waiting")
    return not any(info[name] for name in counts) and info["num_free_blocks"] == info["num_blocks"]


@contextlib.asynccontextmanager
async def pool(
    model: HashModelOptions,
    *,
    num_workers: int,
    num_gateways: int = 1,
    gateway: Mapping[str, str] = MappingProxyType({}),
    output: IO[bytes] | None = None,
    **settings: Any,
) -> AsyncIterator[Pool]:
    """Starts all parts, waits for them, and ends all at exit. `gateway` are environment variables
    of the gateways. They and the workers write to `output` if it is given."""
    keys = Keys("test")
    with EmbeddedRedis() as server:
        client = connect(server.url, keys, command_timeout_s=10.0)
        async with contextlib.aclosing(client):
            await ensure_library(client)
            caller = Caller(Functions(client, keys), client, keys, RETENTION_S)
            with contextlib.ExitStack() as stack:
                processes = [
                    gateway_process(server.url, keys, gateway, output=output)
                    for _ in range(num_gateways)
                ]
                urls = [stack.enter_context(process) for process in processes]
                own = fleet(server.url, num_workers, model, output=output, **settings)
                async with own as workers:
                    await caller.num_workers(num_workers)
                    await asyncio.gather(*map(until_it_answers, urls))
                    yield Pool(server, caller, workers, urls)


@contextlib.asynccontextmanager
async def stack_without_settings() -> AsyncIterator[tuple[str, redis.asyncio.Redis]]:
    """`batchway up` as a newcomer starts it: its URL, and a client of its Redis."""
    with running_stack_without_settings() as stack:
        url = await asyncio.to_thread(lambda: stack.url)
        [socket_path] = stack.temp_dir.glob("batchway-*/redis.sock")
        async with redis.asyncio.Redis.from_url(f"unix://{socket_path}") as client:
            yield url, client


@contextlib.contextmanager
def gateway_process(
    redis_url: str,
    keys: Keys,
    settings: Mapping[str, str] = MappingProxyType({}),
    *,
    output: IO[bytes] | None = None,
) -> Iterator[str]:
    """Yields the URL of a gateway on a free loopback port. `settings` are environment variables. It
    writes its whole log to `output` if that is given, otherwise warnings to our stderr."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        fd = listener.fileno()
        environ = {"REDIS_URL": redis_url, "BATCHWAY_NAMESPACE": keys.namespace}
        environ |= dict.fromkeys(_RETENTION_VARIABLES, f"{RETENTION_S:g}")
        environ["BATCHWAY_LANE_BOUND_S"] = "0"  # its small engines refuse none of the load
        environ |= {"BATCHWAY_API_KEY": "", **settings}
        level = "warning" if output is None else "debug"
        words = ("infra", "gateway", f"--listen-fd={fd}", "--drain-s=0", f"--log-level={level}")
        program = Program(*words, environ=environ, output=output, pass_fds=[fd])
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield url
    finally:
        program.terminate()
        try:
            program.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            program.kill()


async def until_it_answers(url: str) -> None:
    """Raises TimeoutError if the gateway does not become ready."""
    async with httpx.AsyncClient(base_url=url, timeout=5) as http:

        async def is_ready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return (await http.get("/readyz")).status_code == 200
            return False

        await until(is_ready)
