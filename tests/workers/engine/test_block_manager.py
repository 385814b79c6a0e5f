"""Blocks: counts, ids, and one owner for each."""

import pytest

from contract.jobs import SamplingParams
from workers.engine.block_manager import BlockManager
from workers.engine.sequence import Sequence


def sequence_of(num_tokens: int) -> Sequence:
    params = SamplingParams(max_tokens=1, seed=0)
    return Sequence("job", 1, 0, "t", "lane", [0] * num_tokens, num_tokens, params)


def test_growing_beyond_the_free_blocks_raises() -> None:
    """A caller that has not asked `can_grow` is stopped before a block is taken."""
    blocks, sequence = BlockManager(num_blocks=1, block_size=4), sequence_of(20)

    with pytest.raises(AssertionError):
        blocks.grow(sequence, 5)

    assert blocks.num_free == 1


def test_a_release_gives_all_back_and_forgets_what_was_computed() -> None:
    """The sequence has no blocks and nothing computed; the blocks last freed are reused first."""
    blocks, one, two = BlockManager(num_blocks=4, block_size=1), sequence_of(4), sequence_of(4)
    blocks.grow(one, 2)
    one.num_computed = 2
    first_ids = list(one.block_ids)

    blocks.release(one)
    blocks.grow(two, 2)

    assert (one.block_ids, one.num_computed) == ([], 0)
    assert two.block_ids == first_ids
    blocks.audit([one, two])


def test_the_audit_finds_a_block_with_two_owners() -> None:
    """A block with two owners or none."""
    blocks, one, two = BlockManager(num_blocks=2, block_size=1), sequence_of(2), sequence_of(2)
    blocks.grow(one, 1)
    two.block_ids = list(one.block_ids)

    with pytest.raises(AssertionError):
        blocks.audit([one, two])
    with pytest.raises(AssertionError):
        blocks.audit([])
