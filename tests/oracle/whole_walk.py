"""A walk through one world from its first step to its end, when nothing may be left."""

from collections import Counter
from typing import TypeAlias

from contract.library import library_source
from tests.oracle.files_walk import FilesWalk
from tests.oracle.operations_walk import OperationsWalk
from tests.oracle.postal_walk import PostalWalk
from tests.oracle.walk import Walk
from tests.oracle.world import World

Draws: TypeAlias = type[Walk] | type[PostalWalk] | type[FilesWalk] | type[OperationsWalk]


def walk(
    redis_url: str,
    seed: int,
    num_steps: int,
    source: str | None = None,
    audit_every: int = 1,
    draws: Draws = Walk,
) -> Counter[str]:
    """Runs one world; returns how often each reply occurred. Raises what it finds."""
    world = World(redis_url, source or library_source(), audit_every=audit_every)
    try:
        steps = draws(world, seed)
        for _ in range(num_steps):
            steps.step()
        world.settle()
        return world.replies
    finally:
        world.close()
