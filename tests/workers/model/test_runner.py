"""The runner: the slots that a step writes, the output of resumed sequences, and the effect of
neighbours."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.workers.model.conftest import LoadFamily, paged
from tests.workers.model.driver import (
    allot_blocks,
    make_prompts,
    make_sequence,
    run_step,
    run_to_end,
)
from tests.workers.model.loading import load
from tests.workers.model.test_rotary_lengths import LONGROPE
from workers.engine.interface import Chunk, Padding, Sample


def changed_slots(now: Tensor, before: Tensor) -> set[int]:
    """Slots whose bits differ: unwritten slots may contain NaN, which is not equal to itself."""
    differs = now.view(torch.int32) != before.view(torch.int32)
    return set(differs.flatten(1).any(-1).nonzero().flatten().tolist())


def test_a_step_writes_the_slots_of_its_chunks_and_no_others(load_family: LoadFamily) -> None:
    """All other slots of the cache are unchanged, bit for bit."""
    model = paged(load_family("llama")[0])
    sequences = [make_sequence(prompt) for prompt in make_prompts([20, 5], VOCAB_SIZE)]
    allot_blocks(sequences, model)
    layers = list(model.cache.layers.values())
    for layer in layers:
        layer.keys.fill_(7.0)  # no test before may have left the same keys in the same slots
    run_step(model, sequences, chunk_tokens=7)
    before = [layer.key_slots.clone() for layer in layers]

    run_step(model, sequences, chunk_tokens=7)

    expected = set()
    for sequence, positions in ((sequences[0], range(7, 14)), (sequences[1], range(5, 6))):
        size = model.block_size
        expected |= {sequence.block_ids[p // size] * size + p % size for p in positions}
    for layer, old in zip(layers, before, strict=True):
        assert changed_slots(layer.key_slots, old) == expected


def test_a_chunk_that_does_not_sample_yields_nothing(load_family: LoadFamily) -> None:
    model = paged(load_family("llama")[0])
    [sequence] = [make_sequence(prompt) for prompt in make_prompts([20], VOCAB_SIZE)]
    allot_blocks([sequence], model)

    assert model.run([Chunk(sequence, 0, 12, samples=False)]) == [None]
    assert model.run([]) == []


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gpt2"])
def test_padding_is_computed_and_changes_nothing(family: str, load_family: LoadFamily) -> None:
    """Padding rows and padding at the end of rows pass every layer and are written only to the
    scratch block."""
    model = paged(load_family(family)[0])
    sequences = [make_sequence(prompt) for prompt in make_prompts([20, 5], VOCAB_SIZE)]
    allot_blocks(sequences, model)
    chunks = [Chunk(s, 0, s.num_pending, samples=True) for s in sequences]
    alone = model.logits(chunks)
    layers = list(model.cache.layers.values())
    before = [layer.key_slots.clone() for layer in layers]

    padded = model.logits(chunks, [Padding(5, 15), Padding(40, 1)])
    only_padding = model.run([], [Padding(0, 3)])

    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-4)
    assert only_padding == []
    for layer, old in zip(layers, before, strict=True):
        changed_blocks = {slot // model.block_size for slot in changed_slots(layer.key_slots, old)}
        assert changed_blocks == {model.cache.scratch_block_id}


def test_longrope_does_not_change_with_the_neighbours(tmp_path: Path) -> None:
    """A short prompt beside a long one, by whose position transformers would choose the factors."""
    folder = save_tiny_model("phi3", tmp_path, **(LONGROPE | {"max_position_embeddings": 512}))
    model = load(folder).model
    short, long = make_prompts([5, 100], VOCAB_SIZE)

    [alone] = run_to_end(model, [make_sequence(short)], 1000)
    beside, _ = run_to_end(model, [make_sequence(short), make_sequence(long)], 1000)

    assert beside == alone


def test_copied_blocks_are_read_before_any_is_written(load_family: LoadFamily) -> None:
    """Two blocks are swapped in one step, in every layer, keys and values."""
    cache = paged(load_family("llama")[0]).cache
    layers = list(cache.layers.values())
    for layer in layers:
        layer.keys[:2].normal_()
        layer.values[:2].normal_()
    before = [(layer.keys[:2].clone(), layer.values[:2].clone()) for layer in layers]

    cache.copy_blocks([0, 1], [1, 0])

    for layer, (keys, values) in zip(layers, before, strict=True):
        assert torch.equal(layer.keys[:2], keys.flip(0))
        assert torch.equal(layer.values[:2], values.flip(0))


def test_a_choice_that_begins_with_a_copied_block_is_correct(load_family: LoadFamily) -> None:
    """It shares one full block with another choice and has a copy of the partial one."""
    model = load_family("llama")[0].model
    size = model.block_size
    [prompt] = make_prompts([size + 3], VOCAB_SIZE)
    first, second, alone = (make_sequence(prompt) for _ in range(3))
    allot_blocks([first, second, alone], model)
    run_step(model, [first, alone], chunk_tokens=2 * size)
    second.block_ids[0] = first.block_ids[0]
    second.num_computed = size + 2

    copy = Chunk(second, size + 2, 1, samples=True, copy_from=first.block_ids[1])
    [row] = model.run([copy])

    assert isinstance(row, Sample)
    assert row.token_id == alone.token_ids[-1]
