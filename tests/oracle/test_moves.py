"""Tenants that move between partitions: the reference, the invariants, planted mistakes."""

import asyncio

import pytest

from contract.connection import connect
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK, library_with_test_clock
from tests.oracle.moves_mutants import MOVES_MUTANTS
from tests.oracle.moves_walk import walk_of_moves, with_one_cost
from tests.oracle.mutants import Mutant

NOW_MS = 1_700_000_000_000


def walk(server: EmbeddedRedis, seed: int, num_steps: int, source: str) -> None:
    async def run() -> None:
        async with connect(server.url, Keys("walk")) as client:
            await client.flushall()
            await client.function_load(with_one_cost(source), replace=True)
            await client.set(TEST_CLOCK, f"={NOW_MS}")
            try:
                await walk_of_moves(client, "walk", seed, num_steps)
            finally:
                await client.delete(TEST_CLOCK)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_moves_keep_to_the_reference_and_to_all_limits(
    redis_server: EmbeddedRedis, seed: int
) -> None:
    """Whoever dies, repeats, or comes late."""
    walk(redis_server, seed, 400, library_with_test_clock())


@pytest.mark.parametrize("mutant", MOVES_MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.campaign
def test_a_planted_mistake_is_found(redis_server: EmbeddedRedis, mutant: Mutant) -> None:
    source = mutant.apply(library_with_test_clock())
    for seed in (mutant.seed, *range(60)):
        try:
            walk(redis_server, seed, 2000, source)
        except Exception:
            return
    pytest.fail("no walk has found it")
