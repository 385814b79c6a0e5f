"""The function library: builds it from contract/lua/*.lua, loads it, calls its functions. Checks
that Redis keeps jobs, as it is configured, and reads its memory limit."""

import contextlib
import logging
import re
from collections.abc import Sequence
from functools import partial
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import Any

import redis.asyncio
from redis.exceptions import ResponseError

from contract.connection import broker_errors, repeated
from contract.errors import (
    BrokerReplica,
    BrokerUnavailable,
    BrokerUnfit,
    CommandDenied,
    LibraryMissing,
    WireError,
)
from contract.keys import Keys

log = logging.getLogger("batchway.redis")

LIBRARY = "batchway_v1"
Word = str | bytes | int | float  # of a command
_LUA = Path(__file__).parent / "lua"
_REQUIRES = re.compile(r"^-- requires (.+)$", re.MULTILINE)


def library_source() -> str:
    """Returns the library's source: what functions share, then the functions by name. A shared file
    follows those that its header requires. Each function is in a block, as Lua has room for 200
    local names outside of blocks."""
    paths = sorted(_LUA.glob("*.lua"))
    shared = {path.stem: path.read_text("utf-8") for path in paths if path.stem.startswith("_")}
    order = TopologicalSorter({name: _required(text) for name, text in shared.items()})
    functions = [path.read_text("utf-8") for path in paths if path.stem not in shared]
    texts = [shared[name] for name in order.static_order()]
    return "\n".join([*texts, *(f"do\n{text}end" for text in functions)])


def _required(text: str) -> list[str]:
    found = _REQUIRES.search(text)
    return [f"_{name}" for name in found[1].split(", ")] if found else []


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


async def _load_again(client: redis.asyncio.Redis) -> None:
    """Loads the library into the server that lacked it. An idle connection may lead to a server
    that held the partition before, so all are opened again. Raises BrokerUnavailable."""
    await client.connection_pool.disconnect(inuse_connections=False)
    with contextlib.suppress(CommandDenied):  # the deploy step loads it
        await check_fitness(client)
        await ensure_library(client)


class Partition:
    """One partition; subclasses make typed calls of its functions."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def _call(
        self,
        name: str,
        *args: Word,
        reads: bool = False,
        is_repeated: bool = True,
    ) -> Any:
        """Returns a function's reply. `is_repeated`: retries if Redis does not answer. Loads the
        library if a server without it has taken over, where the user may.

        Raises BrokerUnavailable, CommandDenied, and WireError for a key that the functions did not
        write.
        """
        verb, function = "FCALL_RO" if reads else "FCALL", f"{LIBRARY}_{name}"
        call = partial(self._client.execute_command, verb, function, 1, self._keys.tag, *args)

        async def answered() -> Any:
            with broker_errors(self._client, f"{verb} {function}"):
                return await (repeated(call) if is_repeated else call())

        try:
            try:
                return await answered()
            except LibraryMissing:
                await _load_again(self._client)
                return await answered()
        except BrokerReplica:
            # The connections may lead to a former primary: its name may lead to another one now.
            await self._client.connection_pool.disconnect(inuse_connections=False)
            raise
        except ResponseError as exc:
            kind = "another type" if "WRONGTYPE" in str(exc) else "another form"
            raise WireError(
                f"function {name}: a key holds {kind} than the functions write"
            ) from exc

    async def _in_pages(
        self, name: str, size: int, rows: Sequence[Sequence[Word]], *args: Word
    ) -> list[Any]:
        """The replies of a function, a list each, called for so many rows of arguments at a time:
        while it runs, all other calls wait."""
        pages = [chain(*rows[first : first + size]) for first in range(0, len(rows), size)]
        return [part for page in pages for part in await self._call(name, *args, *page)]


def _flatten(reply: Any) -> list[Any]:
    if not isinstance(reply, list):
        return [reply]
    return [leaf for item in reply for leaf in _flatten(item)]


_MIN_MAJOR = 7  # the first with functions
FIT_POLICY = "noeviction"
# Evicts only what has a time to live: no record, log or queue entry of an unfinished job has one.
_POLICY_OF_ENDED = "volatile-"

# The first Valkey that reverts all writes of a function whose block is incomplete in the
# append-only file. No version of Redis does.
_WHOLE_SINCE_VALKEY = (9, 1, 2)


async def check_fitness(client: redis.asyncio.Redis) -> None:
    """Checks the server. Raises BrokerUnfit, BrokerUnavailable, CommandDenied."""
    with broker_errors(client, "INFO"):  # INFO, since managed services have no CONFIG
        known = await repeated(lambda: client.info("memory", "persistence", "server"))
    version = str(known.get("redis_version", _MIN_MAJOR))
    if int(version.partition(".")[0]) < _MIN_MAJOR:
        raise BrokerUnfit(f"Redis {version} has no functions: 7.0 or later is needed")
    policy = known.get("maxmemory_policy", FIT_POLICY)
    if policy.startswith(_POLICY_OF_ENDED):  # it cannot be changed in ElastiCache Serverless
        log.warning(
            "if its memory is full, this Redis drops results, idempotency keys and callbacks early "
            "(maxmemory-policy %s): set it to %s, or keep its maximum above what is stored",
            policy,
            FIT_POLICY,
        )
    elif policy != FIT_POLICY:
        raise BrokerUnfit(
            f"Redis would evict jobs when its memory is full: its maxmemory-policy is {policy}; "
            f"set it to {FIT_POLICY}"
        )
    if known.get("aof_enabled") and not _reverts_blocks(known) and not await _refuses(client):
        log.warning(
            "after a power cut this Redis may run half of a function's writes: "
            "set its aof-load-truncated to no (docs/deployment.md)"
        )


def _reverts_blocks(known: dict[str, Any]) -> bool:
    version = str(known.get("valkey_version", "0")).split(".")
    return tuple(int(part) for part in version if part.isdigit()) >= _WHOLE_SINCE_VALKEY


async def _refuses(client: redis.asyncio.Redis) -> bool:
    """Whether Redis refuses to start with a truncated append-only file. False where CONFIG is not
    allowed or missing, as for the users of docs/security.md and in managed services."""
    try:
        with broker_errors(client, "CONFIG GET"):
            found: Any = await client.config_get("aof-load-truncated")
    except (CommandDenied, BrokerUnavailable) as exc:
        log.info("aof-load-truncated is not known: CONFIG GET failed with %s", type(exc).__name__)
        return False
    return bool(found["aof-load-truncated"] == "no")


async def max_memory(client: redis.asyncio.Redis) -> tuple[int, bool]:
    """The bytes that Redis may use: its `maxmemory`, or the machine's memory where none is set; and
    whether `maxmemory` is set. Raises BrokerUnavailable, CommandDenied.
    """
    with broker_errors(client, "INFO"):
        memory = await client.info("memory")
    limit = int(memory.get("maxmemory", 0))
    return limit or int(memory.get("total_system_memory", 0)), limit > 0
