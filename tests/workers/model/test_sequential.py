"""Sequences run one at a time: when a state is kept or dropped, and its size."""

import gc
from pathlib import Path

import pytest
import torch

from tests.tiny_families import SEQUENTIAL, VOCAB_SIZE
from tests.tiny_models import make_model, save_tiny_model
from tests.workers.model.conftest import LoadFamily, sequential
from tests.workers.model.driver import make_prompts, make_sequence, run_step, run_to_end
from tests.workers.model.loading import load, refusal
from workers.engine.interface import Chunk
from workers.model.loader import ModelRefused
from workers.model.sequential import (
    Continues,
    choose_continuation,
    kept_state,
    state_bytes,
)

# States that continue anywhere, at single tokens only, and never.
KINDS = ["bloom", "minimax", "recurrent_gemma"]
# The error of continuing these is less than the rounding of half precision.
IMPRECISE = {"zamba2"}
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", KINDS)
def test_a_preempted_sequence_goes_on_with_the_same_tokens(
    family: str, load_family: LoadFamily
) -> None:
    """Its state is dropped at the next step, even if it has no chunk in it."""
    model = sequential(load_family(family)[0])
    prompts = make_prompts([20, 9], VOCAB_SIZE)
    expected = run_to_end(model, [make_sequence(prompt) for prompt in prompts], 7)
    sequences = [make_sequence(prompt) for prompt in prompts]
    for _ in range(6):
        run_step(model, sequences, 7)

    sequences[0].num_computed = 0  # what the engine does to release it
    run_step(model, sequences[1:], 7)
    num_states = model.num_states
    found = run_to_end(model, sequences, 7)

    assert num_states == 1
    assert found == expected


@pytest.mark.parametrize("family", KINDS)
def test_a_sequence_at_another_position_than_its_state_restarts(
    family: str, load_family: LoadFamily
) -> None:
    """Rolled back by three tokens, and started in the middle as with a shared prefix."""
    model = sequential(load_family(family)[0])
    [prompt] = make_prompts([20], VOCAB_SIZE)
    [expected] = run_to_end(model, [make_sequence(prompt)], 7)
    rolled_back, begun = make_sequence(prompt), make_sequence(prompt)
    for _ in range(6):
        run_step(model, [rolled_back], 7)
    rolled_back.num_computed -= 3
    begun.num_computed = 16

    assert run_to_end(model, [rolled_back, begun], 7) == [expected, expected]


def test_states_end_with_their_sequences(load_family: LoadFamily) -> None:
    """The model keeps no sequence that the engine has ended."""
    model = sequential(load_family("bloom")[0])
    gc.collect()
    before = model.num_states
    sequences = [make_sequence(prompt) for prompt in make_prompts([5, 6], VOCAB_SIZE)]
    run_step(model, sequences, 64)
    assert model.num_states == before + 2

    del sequences

    assert model.num_states == before


def test_chunks_that_cannot_be_continued_are_put_off(load_family: LoadFamily) -> None:
    """Nothing is computed for them; the chunk that samples computes all."""
    model = sequential(load_family("minimax")[0])
    [prompt] = make_prompts([20], VOCAB_SIZE)
    sequence, whole = make_sequence(prompt), make_sequence(prompt)

    for start in (0, 7):
        assert model.run([Chunk(sequence, start, 7, samples=False)]) == [None]
        sequence.num_computed += 7
    logits = model.logits([Chunk(sequence, 14, 6, samples=True)])

    torch.testing.assert_close(logits, model.logits([Chunk(whole, 0, 20, samples=True)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", sorted(SEQUENTIAL.keys() - IMPRECISE))
@pytest.mark.each_value
def test_half_precision_never_goes_on_further_than_float32(
    family: str, dtype: torch.dtype, load_family: LoadFamily
) -> None:
    """Rounding must not hide a lost state."""
    order = list(Continues)
    model = make_model(family)
    exact = sequential(load_family(family)[0]).continues

    found = choose_continuation(model.to(dtype), model.config, CPU)

    assert order.index(found) >= order.index(exact)


def test_a_state_counts_all_its_tensors() -> None:
    """Keys and values by token; convolutions and matrices by sequence."""
    ids = torch.arange(10)[None]
    mamba = kept_state(make_model("mamba")(ids, use_cache=True))
    bloom = kept_state(make_model("bloom")(ids, use_cache=True))

    assert state_bytes(mamba) == 2 * (96 * 4 + 96 * 8) * 4  # layers, conv and scan, float32
    assert state_bytes(bloom) == 2 * 2 * 10 * 64 * 4  # layers, keys and values, tokens


def test_blocks_are_counted_so_that_all_states_fit(tmp_path: Path) -> None:
    """Bytes per token come from the blocks; bytes per sequence are reserved for the maximum number
    of sequences."""
    save_tiny_model("bloom", tmp_path / "bloom")
    save_tiny_model("mamba", tmp_path / "mamba")

    assert load(tmp_path / "bloom", kv_memory_bytes=2**20).model.num_blocks == 2**20 // (16 * 1024)
    mamba = load(tmp_path / "mamba", max_model_len=100, kv_memory_bytes=2**20)
    assert mamba.model.num_blocks == 4 * 7
    sentence = refusal(tmp_path / "mamba", max_num_seqs=400, kv_memory_bytes=2**20)
    assert "states of max_num_seqs 400" in sentence


def test_a_model_that_looks_ahead_is_refused() -> None:
    """It cannot be continued in any way: this decoder reads one token ahead."""
    model = make_model("bloom")
    embed = model.transformer.word_embeddings
    embed.register_forward_hook(lambda module, args, out: out + out.roll(-1, dims=1))

    with pytest.raises(ModelRefused, match="tokens follow"):
        choose_continuation(model, model.config, CPU)
