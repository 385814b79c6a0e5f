"""The reference and the audit find mistakes planted in the functions."""

import pytest

from contract.library import library_source
from infra.embedded_redis import EmbeddedRedis
from tests.oracle.files_mutants import FILES_MUTANTS
from tests.oracle.files_walk import FilesWalk
from tests.oracle.mutants import MUTANTS, Mutant
from tests.oracle.operations_mutants import OPERATIONS_MUTANTS
from tests.oracle.operations_walk import OperationsWalk
from tests.oracle.outbox_mutants import OUTBOX_MUTANTS
from tests.oracle.postal_walk import PostalWalk
from tests.oracle.walk import Walk
from tests.oracle.whole_walk import Draws, walk

# Replies are compared at every step. Wrong values in Redis mostly stay there for some steps, and an
# audit takes as long as ten steps: with one at every twelfth step, all mutants are found in half of
# the time that it takes with one at every fourth.
AUDIT_EVERY = 12
WALKS: dict[str, Draws] = {
    "jobs": Walk,
    "outbox": PostalWalk,
    "files": FilesWalk,
    "operations": OperationsWalk,
}


ALL = [*MUTANTS, *OUTBOX_MUTANTS, *FILES_MUTANTS, *OPERATIONS_MUTANTS]


def test_every_mistake_can_be_planted() -> None:
    """Its text is in the functions, once."""
    for mutant in ALL:
        assert mutant.apply(library_source()) != library_source(), mutant.name


@pytest.mark.campaign
@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_planted_mistake_is_found(redis_server: EmbeddedRedis, mutant: Mutant) -> None:
    """Each mutant is found within a hundred walks."""
    source = mutant.apply(library_source())
    for seed in (mutant.seed, *range(100)):  # rare faults take their time
        try:
            walk(redis_server.url, seed, 150, source, AUDIT_EVERY, WALKS[mutant.part])
        except Exception:  # an invariant, a difference, or a call that Redis refuses
            return
    pytest.fail("the walk did not notice")
