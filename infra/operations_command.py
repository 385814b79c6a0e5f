"""Operations on many jobs by filter, for `batchway jobs` and `batchway callbacks dead`: cancels and
replays of callbacks are done here, replays of jobs by the gateways, which this waits for.

If the command ends early, gateways go on.
"""

import argparse
import asyncio
import re
import secrets
import sys

import redis.asyncio
from msgspec.structs import replace

from contract import operation_parts
from contract.batches import LeaseLost
from contract.connection import now_ms
from contract.function_types import Wanted
from contract.jobs import PUBLIC_STATUSES
from contract.keys import in_partition
from contract.operations import (
    Operation,
    OperationKind,
    Operations,
    OperationsFull,
    OperationState,
    new_operation_id,
)
from contract.shards import OpenShards
from infra import options as opts
from infra.options import Option, Value
from infra.preconditions import UsageError
from infra.tables import write
from workers.settings import LANES

DEFAULT_TENANT = "default"
ALL_TENANTS = "*"
_LEASE_S = 10.0
_POLL_S = 0.2
_METADATA = re.compile(r"([^=]{1,64})=(.{0,512})")


def add_filter_options(
    parser: argparse.ArgumentParser, statuses: tuple[str, ...], status_shown: str = "any"
) -> None:
    table = {
        "status": Option("only this state", statuses, shown=status_shown),
        "lane": Option("only this lane", LANES, shown="any"),
        "served_model_name": Option("only this one", opts.NAME, shown="any"),
        "error_code": Option("only jobs that failed with it", opts.NAME, shown="any"),
        "older_than": Option("only jobs submitted before so long", opts.SECONDS, shown="any"),
        "newer_than": Option("only jobs submitted since so long", opts.SECONDS, shown="any"),
        "metadata": Option(
            "only jobs with this metadata; may be repeated",
            Value(_metadata, "NAME=VALUE"),
            [],
            "any",
        ),
    }
    opts.add_options(parser, table)


def _metadata(raw: str) -> tuple[str, str]:
    match = _METADATA.fullmatch(raw)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {raw!r}")
    return match[1], match[2]


async def wanted_of(client: redis.asyncio.Redis, options: argparse.Namespace) -> Wanted:
    """The filters of the options; ages by the Redis clock."""
    at_ms = await now_ms(client)

    def before(age_s: float | None) -> int:
        return 0 if age_s is None else at_ms - int(age_s * 1000)

    return Wanted(
        statuses=PUBLIC_STATUSES[options.status] if options.status else frozenset(),
        lanes=frozenset([options.lane] if options.lane else []),
        model=options.served_model_name or "",
        error_code=options.error_code or "",
        created_after_ms=before(options.newer_than),
        created_before_ms=before(options.older_than),
        metadata=dict(options.metadata),
    )


def has_filter(options: argparse.Namespace) -> bool:
    names = "status", "lane", "served_model_name", "error_code", "older_than", "newer_than"
    return bool(options.metadata) or any(getattr(options, name) is not None for name in names)


async def run_operation(
    shards: OpenShards, options: argparse.Namespace, kind: OperationKind
) -> None:
    """Begins an operation and shows its end. Raises UsageError, BrokerUnavailable."""
    if not has_filter(options):
        raise UsageError("give a JOB, or at least one filter")
    if options.tenant == ALL_TENANTS and kind is OperationKind.REPLAY_CALLBACKS:
        raise UsageError("--tenant must be one tenant")
    wanted = await wanted_of(shards.first.client, options)
    if kind is OperationKind.REPLAY and not wanted.statuses:
        wanted = replace(wanted, statuses=PUBLIC_STATUSES["failed"])
    is_all = options.tenant == ALL_TENANTS
    owner, tenant = (DEFAULT_TENANT, "") if is_all else (options.tenant, options.tenant)
    terms = {"owner": owner, "tenant": tenant}
    try:
        operation_id = await operation_parts.add(shards, new_operation_id(), kind, wanted, **terms)
    except OperationsFull as exc:
        raise UsageError(str(exc)) from exc
    if kind is OperationKind.REPLAY:
        print(f"{operation_id}: waiting for gateways", file=sys.stderr)
    ended = await _ended(shards, operation_id, works=kind is not OperationKind.REPLAY)
    shown = {"id": ended.id, "status": ended.state.value, "matched": ended.matched}
    shown |= {"done": ended.done, "failed": ended.failed}
    text = f"{ended.state}: {ended.matched} matched, {ended.done} done, {ended.failed} failed"
    write(shown, text, options.json)


async def _ended(shards: OpenShards, operation_id: str, *, works: bool) -> Operation:
    """Works on the operation, or waits while a gateway does."""
    token = secrets.token_hex(8)
    while True:
        found = await operation_parts.find(shards, operation_id)
        assert found is not None, "it is kept for a week after its end"
        if found.state is not OperationState.RUNNING:
            return found
        has_worked = False
        for shard in await shards.of_list(found.tenant) if works else []:
            part_id = in_partition(operation_id, shard.number)
            if await shard.operations.take(token, lease_s=_LEASE_S, only=part_id) is not None:
                await _work(shard.operations, part_id, token)
                has_worked = True
        if not has_worked:
            await asyncio.sleep(_POLL_S)


async def _work(operations: Operations, operation_id: str, token: str) -> None:
    try:
        state = OperationState.RUNNING
        while state is OperationState.RUNNING:
            state = (await operations.step(operation_id, token, lease_s=_LEASE_S)).state
    except LeaseLost:
        return
