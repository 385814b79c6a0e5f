"""Mistakes that can be planted in a worker or a gateway, to check that a campaign finds them."""

import os
from collections.abc import Sequence
from enum import StrEnum

from contract.events import LogEntry

VARIABLE = "CHAOS_MISTAKE"


class Mistake(StrEnum):
    """A mistake planted in every process of a fleet that can make it."""

    NONE = ""
    WORKER_FORGETS_THE_LOG = "a resumed job starts again at its first token"
    GATEWAY_SKIPS_AN_EVENT = "one event in twenty is not passed on"


def plant_in_worker() -> None:
    """Plants the configured mistake in this process's worker."""
    if os.environ.get(VARIABLE) == Mistake.WORKER_FORGETS_THE_LOG:
        from workers.supervisor.held_job import HeldJob

        setattr(HeldJob, "replay", _forget)  # noqa: B010 - a mistake has no type


def plant_in_gateway() -> None:
    """Plants the configured mistake in this process's gateway."""
    from gateway.redis.hints import Cursor

    if os.environ[VARIABLE] == Mistake.GATEWAY_SKIPS_AN_EVENT:
        next_of = Cursor.next_of

        def skip(cursor: Cursor, entries: Sequence[LogEntry]) -> list[LogEntry]:
            return [entry for entry in next_of(cursor, entries) if entry.number % 20 != 7]

        setattr(Cursor, "next_of", skip)  # noqa: B010


def _forget(_: object, entries: list[LogEntry]) -> None:
    del entries
