"""The partitions of a namespace: how many there are, and which of them is a tenant's.

A partition is everything under one hash tag. Their number is fixed when the namespace is made; it
is kept in partition 0. A tenant's partition follows from its name, an object's from its id
(contract/keys.py). Nothing moves.
"""

import hashlib
import logging
from typing import Any

import redis.asyncio

from contract.connection import broker_errors, repeated
from contract.errors import BrokerUnfit
from contract.keys import Keys

log = logging.getLogger("batchway.partitions")

MAX_PARTITIONS = 16
_NUMBER = "num_partitions"
_MAP = "partitions"  # a hash of releases in which tenants moved: by number, and these
_OF_MAP = {b"version", b"shared_ms"}


class PartitionsDiffer(BrokerUnfit):
    """The namespace has another number of partitions than this process was given."""


def partition_of_tenant(tenant: str, num_partitions: int) -> int:
    """The partition of all that a tenant has: the first 8 bytes of SHA-256 of its name, modulo the
    number."""
    digest = hashlib.sha256(tenant.encode()).digest()
    return int.from_bytes(digest[:8]) % num_partitions


async def known_number(client: redis.asyncio.Redis, keys: Keys, given: int | None) -> int | None:
    """The number of partitions of a namespace; None while it is not made. `client`, `keys`: of
    partition 0; `given`: the number that this process was given, None: none. Raises
    PartitionsDiffer, BrokerUnavailable, CommandDenied, WireError."""
    with broker_errors(client, "GET or HGETALL", record="number of partitions"):
        raw: Any = await repeated(lambda: client.get(keys.of(_NUMBER)))
        number = None if raw is None else int(raw)
        map_: Any = {} if raw else await repeated(lambda: client.hgetall(keys.of(_MAP)))
    if map_.keys() - _OF_MAP - {b"0"}:
        raise PartitionsDiffer(
            f"the namespace {keys.namespace!r} has partitions of an earlier release, between which "
            "tenants moved: drain all but partition 0 with that release (`batchway partitions "
            "drain`), or use another namespace and let that release finish its jobs here"
        )
    if number is not None and given not in (None, number):
        raise PartitionsDiffer(
            f"the namespace {keys.namespace!r} has {number} partitions, for good, but this process "
            f"was given {given}: set BATCHWAY_PARTITIONS={number}, or use another namespace"
        )
    return number


async def made_number(client: redis.asyncio.Redis, keys: Keys, given: int | None) -> int:
    """The same; makes the namespace, with `given` partitions or one, if it is not. One that holds
    jobs or files has one partition. Raises what known_number raises."""
    number = await known_number(client, keys, given)
    if number is not None:
        return number
    with broker_errors(client, "EXISTS or SET"):
        held = keys.of("jobs", ""), keys.of("file_bytes")
        is_used = bool(await repeated(lambda: client.exists(*held)))
        wanted = 1 if is_used else given or 1
        if await client.set(keys.of(_NUMBER), wanted, nx=True):
            log.info("partitions made num=%d namespace=%s", wanted, keys.namespace)
    number = await known_number(client, keys, given)
    return 1 if number is None else number
