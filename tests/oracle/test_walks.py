"""Random walks: whatever the order of calls, each job ends once, and every record is sound."""

import pytest

from infra.embedded_redis import EmbeddedRedis
from tests.marks import LONG
from tests.oracle.other_walks import FilesWalk, OperationsWalk, OutboxWalk
from tests.oracle.walk import Walk, walk
from tests.oracle.world import World, new_world

WALKS = (Walk, OutboxWalk, FilesWalk, OperationsWalk)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=LONG) for seed in (2, 3))])
@pytest.mark.parametrize("draws", WALKS)
def test_any_order_of_calls_keeps_every_promise(world: World, draws: type[Walk], seed: int) -> None:
    walk(world, draws, seed, 150)


@pytest.mark.campaign
@pytest.mark.parametrize("draws", WALKS)
def test_many_walks_keep_every_promise(redis_server: EmbeddedRedis, draws: type[Walk]) -> None:
    for seed in range(100, 105):
        with new_world(redis_server.url) as world:
            walk(world, draws, seed, 300)
