"""The queue of production on a virtual clock: its functions on a private server, in which the one
function that reads the time is the simulation's."""

import re
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar, cast

import redis
import redis.asyncio

from contract.functions import Functions
from contract.keys import Keys
from contract.library import LIBRARY, library_source
from contract.starts import Starts

T = TypeVar("T")

_CLOCK = re.compile(r"local function now_ms\(\)\n.*?\nend\n", re.DOTALL)
_CALLBACK = "callback = callback, flags"
# Each call brings its time as a second key: an argument would shift the others.
_VIRTUAL_CLOCK = """local virtual_ms
local function now_ms() return virtual_ms end
local function at_its_time(callback)
  return function(keys, argv)
    virtual_ms = tonumber(keys[2])
    return callback(keys, argv)
  end
end
"""


def virtual_library() -> str:
    """The source of the production's functions with the virtual clock in place of Redis's."""
    source, num_clocks = _CLOCK.subn("", library_source())
    head, num_callbacks, body = source.partition("\n")[0], source.count(_CALLBACK), source
    assert (num_clocks, num_callbacks) == (1, 1), "the library has another clock than this expects"
    body = body.removeprefix(head).replace(_CALLBACK, "callback = at_its_time(callback), flags")
    return f"{head}\n{_VIRTUAL_CLOCK}{body}"


class _VirtualClient:
    """A client as redis.asyncio's, which has its replies at once: the clock stands still meanwhile.
    Functions are called at the virtual time."""

    def __init__(self, server: redis.Redis, now_ms: Callable[[], int]) -> None:
        self._server = server
        self._now_ms = now_ms
        self.connection_pool = server.connection_pool

    async def execute_command(self, verb: str, function: str, _: int, tag: str, *args: Any) -> Any:
        words = verb, function, 2, tag, self._now_ms(), *args
        return self._server.execute_command(*words)  # type: ignore[no-untyped-call]

    async def time(self) -> tuple[int, int]:
        return divmod(1000 * self._now_ms(), 10**6)

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        command = getattr(self._server, name)

        async def call(*args: Any, **options: Any) -> Any:
            return command(*args, **options)

        return call


class VirtualQueue:
    """The queue at the time of `now_ms`, in Unix milliseconds. `url` names a server that nobody
    else uses."""

    def __init__(self, url: str, now_ms: Callable[[], int]) -> None:
        self._server = redis.Redis.from_url(url, protocol=2)
        self._server.config_set("appendonly", "no")
        self._server.flushall()  # its jobs and workers are of another simulation
        self._server.function_load(virtual_library(), replace=True)
        self._now_ms = now_ms
        self.client = cast(redis.asyncio.Redis, _VirtualClient(self._server, now_ms))
        self.keys = Keys()
        self.functions = Functions(self.client, self.keys)
        self.starts = Starts(self.client, self.keys)

    def delete(self, jobs: Iterable[tuple[str, str]]) -> None:
        """Deletes ended jobs, given by id and tenant, in one round trip."""
        with self._server.pipeline(transaction=False) as pipeline:
            for words in jobs:
                head = "FCALL", f"{LIBRARY}_delete", 2, self.keys.tag, self._now_ms()
                pipeline.execute_command(*head, *words)  # type: ignore[no-untyped-call]
            pipeline.execute()

    def memory_bytes(self) -> int:
        """Of the server, by which admission bounds what waits."""
        return int(self._server.info("memory")["maxmemory"])

    def close(self) -> None:
        self._server.close()


def done(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine of the queue, which never waits."""
    try:
        work.send(None)
    except StopIteration as stop:
        return cast(T, stop.value)
    work.close()
    raise AssertionError("a call of the virtual queue waited")
