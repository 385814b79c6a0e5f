"""Output of transformers' `generate` for the tiny models, and how close a near-tie must be."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.tiny_families import PAGED, VOCAB_SIZE
from tests.workers.model.driver import generate_greedily, make_prompts

PROMPT_LENGTHS = (1, 3, 16, 17, 33, 50)  # around blocks of 16 and windows of 12
NUM_OUTPUT = 14  # from 3 past the window, from 16 and 33 into the next block and beyond
# Two logits closer than this are a tie that rounding may break either way.
NEAR_TIE = 1e-3


@dataclass
class Expected:
    """transformers' model, the prompts, and its output for each alone. `num_near_ties` counts
    accepted differences."""

    decoder: Any
    prompts: list[list[int]]
    outputs: list[list[int]] = field(init=False)
    num_near_ties: int = 0

    def __post_init__(self) -> None:
        self.outputs = [generate_greedily(self.decoder, p, NUM_OUTPUT) for p in self.prompts]

    def check(self, number: int, found: list[int]) -> None:
        """Asserts equal tokens up to the length of `found`, or a near-tie at the first
        difference."""
        self.check_against(self.outputs[number][: len(found)], self.prompts[number], found)

    @torch.inference_mode()
    def check_against(self, expected: list[int], prompt: list[int], found: list[int]) -> None:
        if found == expected:
            return
        first = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
        logits = self.score(prompt + expected[:first])
        gap = float((logits[expected[first]] - logits[found[first]]).abs())
        self.num_near_ties += 1
        print(f"differs at output {first}: logits {gap:.2e} apart")
        assert gap < NEAR_TIE, f"differs at output {first} by {gap} in the logits"

    @torch.inference_mode()
    def score(self, token_ids: list[int]) -> torch.Tensor:
        """Teacher-forced: the logits (vocab_size,) of the next token."""
        logits: torch.Tensor = self.decoder(torch.tensor([token_ids]), use_cache=False).logits
        return logits[0, -1]


_expected: dict[str, Expected] = {}


def expected_of(family: str, folder: Path) -> Expected:
    """Computed once a session."""
    if family not in _expected:
        # Falcon's ALiBi differs between transformers' implementations.
        attention = "eager" if family in PAGED else None
        decoder: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
        _expected[family] = Expected(decoder, make_prompts(PROMPT_LENGTHS, VOCAB_SIZE))
    return _expected[family]


def num_near_ties() -> int:
    """All differences accepted in this session."""
    return sum(expected.num_near_ties for expected in _expected.values())
