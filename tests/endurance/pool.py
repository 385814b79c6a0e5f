"""Workers and a gateway as processes on their own Redis, with access to its state."""

import contextlib
import os
import socket
import subprocess
import sys
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
from tests.fleet import Caller, WorkerProcess, fleet, until
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
    url: str  # of the gateway; '' without one

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
    has_gateway: bool = True,
    output: IO[bytes] | None = None,
    **settings: Any,
) -> AsyncIterator[Pool]:
    """Starts all parts, waits for the workers, and ends all parts at exit. Gateway and workers
    write to `output` if it is given."""
    keys = Keys("test")
    with EmbeddedRedis() as server:
        client = connect(server.url, keys, command_timeout_s=10.0)
        async with contextlib.aclosing(client):
            await ensure_library(client)
            caller = Caller(Functions(client, keys), client, keys, RETENTION_S)
            process = gateway_process(server.url, keys, output=output)
            with process if has_gateway else contextlib.nullcontext("") as url:
                own = fleet(server.url, num_workers, model, output=output, **settings)
                async with own as workers:
                    await caller.num_workers(num_workers)
                    if has_gateway:
                        await until_it_answers(url)
                    yield Pool(server, caller, workers, url)


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
        command = [sys.executable, "-m", "infra", "gateway", f"--listen-fd={fd}", "--drain-s=0"]
        environ = os.environ | {"REDIS_URL": redis_url, "BATCHWAY_NAMESPACE": keys.namespace}
        environ |= dict.fromkeys(_RETENTION_VARIABLES, f"{RETENTION_S:g}")
        environ["BATCHWAY_LANE_BOUND_S"] = "0"  # its small engines refuse none of the load
        environ |= settings
        environ.pop("BATCHWAY_API_KEY", None)
        process = subprocess.Popen(
            [*command, f"--log-level={'warning' if output is None else 'debug'}"],
            env=environ,
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def until_it_answers(url: str) -> None:
    """Raises TimeoutError if the gateway does not become ready."""
    async with httpx.AsyncClient(base_url=url, timeout=5) as http:

        async def is_ready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return (await http.get("/readyz")).status_code == 200
            return False

        await until(is_ready)
