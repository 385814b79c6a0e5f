"""Runs a model without an engine: chunks of fixed size, block tables in random order."""

import random
from collections.abc import Sequence as Seq
from typing import Any

import torch

from contract.jobs import SamplingParams
from workers.engine.interface import Chunk, Model, RowFailed, Sample
from workers.engine.sequence import Sequence, SequenceState


def make_sequence(
    prompt_ids: Seq[int],
    *,
    output_ids: Seq[int] = (),
    choice: int = 0,
    ending_ids: frozenset[int] = frozenset(),
    **params: Any,
) -> Sequence:
    """A sequence with its prompt, and with output where it resumes."""
    arguments = {"max_tokens": 16, "seed": 1, "temperature": 0.0} | params
    return Sequence(
        job_id="job",
        epoch=1,
        choice=choice,
        tenant="tenant",
        lane="lane",
        token_ids=[*prompt_ids, *output_ids],
        num_prompt=len(prompt_ids),
        params=SamplingParams(**arguments),
        ending_ids=ending_ids,
    )


def allot_blocks(sequences: Seq[Sequence], model: Model, seed: int = 0) -> None:
    """Gives each sequence all the blocks it will need, in random order, and a slot for a state."""
    free = list(range(model.num_blocks))
    random.Random(seed).shuffle(free)
    for slot, sequence in enumerate(sequences):
        sequence.state = SequenceState(slot)
        longest = sequence.num_prompt + sequence.params.max_tokens
        for _ in range(-(-longest // model.block_size)):
            sequence.block_ids.append(free.pop())


def run_step(model: Model, sequences: Seq[Sequence], chunk_tokens: int) -> list[Sample]:
    """One step of each unfinished sequence; returns the new samples."""
    chunks = []
    for sequence in sequences:
        num_tokens = min(sequence.num_pending, chunk_tokens)
        if sequence.num_output >= sequence.params.max_tokens:
            continue
        samples = num_tokens == sequence.num_pending
        chunks.append(Chunk(sequence, sequence.num_computed, num_tokens, samples))
    found = []
    for chunk, row in zip(chunks, model.run(chunks), strict=True):
        chunk.sequence.num_computed += chunk.num_tokens
        assert not isinstance(row, RowFailed)
        assert isinstance(row, Sample) == chunk.samples
        if isinstance(row, Sample):
            chunk.sequence.token_ids.append(row.token_id)
            found.append(row)
    return found


def run_to_end(model: Model, sequences: Seq[Sequence], chunk_tokens: int) -> list[list[int]]:
    """The output ids of the sequences, run together until each has max_tokens."""
    allot_blocks(sequences, model)
    while any(s.num_output < s.params.max_tokens for s in sequences):
        run_step(model, sequences, chunk_tokens)
    return [s.token_ids[s.num_prompt :] for s in sequences]


def make_prompts(lengths: Seq[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random token ids above the special tokens."""
    generator = random.Random(seed)
    return [[generator.randrange(4, vocab_size) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def generate_greedily(decoder: Any, prompt_ids: Seq[int], num_tokens: int) -> list[int]:
    """transformers' own `generate`, alone and with its own cache and attention."""
    output = decoder.generate(
        torch.tensor([list(prompt_ids)]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids: list[int] = output[0, len(prompt_ids) :].tolist()
    return ids
