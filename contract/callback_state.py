"""How far the callback of a job is, as its caller may see it: no target, no secret."""

from typing import Any

import msgspec
import redis.asyncio

from contract.callbacks import OutboxState
from contract.connection import broker_errors
from contract.errors import wire_errors
from contract.keys import Keys

_SHOWN = {OutboxState.DELIVERED: "delivered", OutboxState.DEAD: "given_up"}


class CallbackState(msgspec.Struct, frozen=True):
    """`state` is `pending`, `delivered` or `given_up`. `next_attempt_ms` (of Redis): None while an
    attempt is under way, or nothing is to be told yet."""

    state: str
    num_attempts: int
    next_attempt_ms: int | None


async def callback_state(
    client: redis.asyncio.Redis, keys: Keys, job_id: str, tenant: str
) -> CallbackState | None:
    """None where the tenant's job has no callback. Raises BrokerUnavailable, WireError."""
    with wire_errors("record of the outbox"), broker_errors(client, "HMGET"):
        job: Any = await client.hmget(keys.job(job_id), ["tenant", "callback_to"])
        record: Any = await client.hmget(
            keys.of("out", job_id), ["tenant", "state", "attempt", "to"]
        )
        if record[0] is None:
            has_one = job[0] == tenant.encode() and job[1]
            return CallbackState("pending", 0, None) if has_one else None
        if record[0] != tenant.encode():
            return None
        due: Any = None
        if record[1] == b"due" and record[3]:
            due = await client.zscore(keys.of("due", record[3].decode()), job_id)
        state = OutboxState(record[1].decode())
        return CallbackState(
            _SHOWN.get(state, "pending"), int(record[2] or 0), None if due is None else int(due)
        )
