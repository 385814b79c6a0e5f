"""The function library: builds it from contract/lua/*.lua, loads it, calls its functions."""

import logging
from pathlib import Path
from typing import Any

import redis.asyncio
from redis.exceptions import ResponseError

from contract.connection import broker_errors, repeated
from contract.errors import CommandDenied, WireError
from contract.keys import Keys

log = logging.getLogger("batchway.redis")

LIBRARY = "batchway_v1"
_SHARED = (  # in this order
    "shared",
    "fairness",
    "ledger",
    "outbox",
    "running",
    "totals",
    "queue",
    "promises",
    "pools",
    "ab",
    "admission",
    "memory",
)
_LUA = Path(__file__).parent / "lua"


def library_source() -> str:
    """Returns the library's source: the shared parts, then the functions by name. Each function is
    in a block, as Lua has room for 200 local names outside of blocks."""
    shared = [(_LUA / f"_{name}.lua").read_text() for name in _SHARED]
    functions = [path.read_text() for path in sorted(_LUA.glob("[a-z]*.lua"))]
    return "\n".join([*shared, *(f"do\n{text}end" for text in functions)])


async def ensure_library(client: redis.asyncio.Redis) -> None:
    """Loads the library where the server has none or a different one. Where the user lacks the
    right, logs that: then the deploy step must load it, and calls raise BrokerUnavailable until it
    has.

    Raises BrokerUnavailable.
    """
    source = library_source()
    try:
        with broker_errors(client, "FUNCTION"):
            loaded: Any = await client.function_list(library=LIBRARY, withcode=True)
            if source.encode() not in _flatten(loaded):
                await client.function_load(source, replace=True)
    except CommandDenied:
        log.info("FUNCTION is not allowed here: the library is left to the deploy step")


class Partition:
    """One partition; subclasses make typed calls of its functions."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def _call(
        self,
        name: str,
        *args: str | bytes | int | float,
        reads: bool = False,
        is_repeated: bool = True,
    ) -> Any:
        """Returns a function's reply. `is_repeated`: retries if Redis does not answer.

        Raises BrokerUnavailable, CommandDenied, and WireError for a key that the functions did not
        write.
        """
        verb, function = "FCALL_RO" if reads else "FCALL", f"{LIBRARY}_{name}"

        async def call() -> Any:
            words = verb, function, 1, self._keys.tag, *args
            return await self._client.execute_command(*words)  # type: ignore[no-untyped-call]

        try:
            with broker_errors(self._client, f"{verb} {function}"):
                return await (repeated(call) if is_repeated else call())
        except ResponseError as exc:
            kind = "another type" if "WRONGTYPE" in str(exc) else "another form"
            raise WireError(
                f"function {name}: a key holds {kind} than the functions write"
            ) from exc


def _flatten(reply: Any) -> list[Any]:
    if not isinstance(reply, list):
        return [reply]
    return [leaf for item in reply for leaf in _flatten(item)]
