"""Evaluates the demo model on exercises it never saw: accuracy, and margin.

Greedy decoding is right exactly if, given the right answer, the largest logit is the right token
everywhere. So one pass over question and answer measures both.
"""

import random
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from training.documents import answer_ids, prompt_ids
from training.draws import FAMILIES, draw
from training.tasks import Exercise
from training.tokenizer import PAD_ID

_TOKENS_PER_BATCH = 16_384


@dataclass(frozen=True, slots=True)
class Score:
    """The smallest gap between the two largest logits of an answer, and whether it is right."""

    exercise: Exercise
    is_right: bool
    min_gap: float


def held_out(family: str, seed: int, num_exercises: int) -> list[Exercise]:
    """Distinct exercises excluded from training, except in `talk`, which is small and closed."""
    rng = random.Random(f"{seed} {family}")
    found: dict[str, Exercise] = {}
    for _ in range(num_exercises * 20):
        exercise = draw(family, rng, is_held_out=True)
        found[exercise.question] = exercise
        if len(found) == num_exercises:
            break
    return list(found.values())


def score_families(
    model: LlamaForCausalLM, *, seed: int, num_exercises: int
) -> dict[str, list[Score]]:
    """The scores of every family on held-out exercises."""
    return {family: score(model, held_out(family, seed, num_exercises)) for family in FAMILIES}


@torch.inference_mode()
def score(model: LlamaForCausalLM, exercises: list[Exercise]) -> list[Score]:
    """One forward pass over questions with answers, in batches of similar length."""
    scores: list[Score] = []
    by_length = sorted(exercises, key=lambda e: len(prompt_ids(e)) + len(answer_ids(e)))
    while by_length:
        width = len(prompt_ids(by_length[-1])) + len(answer_ids(by_length[-1]))
        num_rows = max(1, _TOKENS_PER_BATCH // width)
        chunk, by_length = by_length[-num_rows:], by_length[:-num_rows]
        token_ids = torch.full((len(chunk), width), PAD_ID)
        for row, exercise in enumerate(chunk):
            ids = prompt_ids(exercise) + answer_ids(exercise)
            token_ids[row, : len(ids)] = torch.tensor(ids)
        logits = model(token_ids, use_cache=False).logits
        scores += [_score_row(exercise, logits[row]) for row, exercise in enumerate(chunk)]
    return scores


def _score_row(exercise: Exercise, logits: torch.Tensor) -> Score:
    """Scores one row of logits [tokens, vocabulary]."""
    start, answer = len(prompt_ids(exercise)), torch.tensor(answer_ids(exercise))
    best = logits[start - 1 : start - 1 + len(answer)].topk(2, dim=-1)
    gaps = best.values[:, 0] - best.values[:, 1]
    is_right = bool((best.indices[:, 0] == answer).all())
    return Score(exercise, is_right, float(gaps.min()))


@torch.inference_mode()
def generates_right(model: LlamaForCausalLM, exercise: Exercise) -> bool:
    """Whether transformers generates the answer token by token."""
    prompt = torch.tensor([prompt_ids(exercise)])
    answer = answer_ids(exercise)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=len(answer),
        do_sample=False,
    )
    return [int(token) for token in output[0, prompt.shape[1] :]] == answer


def accuracy(scores: list[Score]) -> float:
    """The share that is right, 0 to 1."""
    return sum(s.is_right for s in scores) / len(scores)


def gap_quantile(scores: list[Score], share: float) -> float:
    """The gap that `share` of the answers do not reach."""
    gaps = sorted(s.min_gap for s in scores)
    return gaps[min(len(gaps) - 1, int(share * len(gaps)))]
