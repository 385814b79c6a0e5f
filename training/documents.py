"""Turns exercises into token ids, with positions and a mask of learned tokens. Does not use
tensors."""

import random
import re
from dataclasses import dataclass, field

from training.draws import FAMILIES, draw, draw_with_tools
from training.tasks import Exercise
from training.tokenizer import ASSISTANT_ID, BOS_ID, END_ID, SPECIAL_TOKENS, SYSTEM_ID, USER_ID
from training.words import phrase

# How often a family is drawn; hard ones more often.
_WEIGHTS = {
    "count up": 24, "count down": 20, "long count up": 16, "long count down": 12,
    "spell": 9, "reverse": 18, "capitals": 5, "letter": 4,
    "add": 26, "subtract": 22, "compare": 11, "calendar": 5,
    "repeat": 13, "repeat beyond ASCII": 8, "continue": 5, "talk": 1, "beyond": 3,
    "call a tool": 14, "read a result": 6, "no tool needed": 7, "JSON": 7, "schema": 7,
}  # fmt: skip

_SYSTEM_MESSAGES = (
    "You are a helpful assistant.", "You are a helpful assistant.", "Be brief.",
    "Answer in English.",
    "You are a careful assistant. Answer with the answer only.",
)  # fmt: skip

_MAX_SHORT_ANSWER = 80
_NUM_NEAR_MISS_TOKENS = 500
"""So far before the end of a long count stands a number that differs from the last in its
hundreds alone: a hundred numbers of three digits, a comma and a space."""

_NUM_BLIND_TOKENS = 12
"""After a hole in a document, tokens whose past lies in the hole are not learned."""


@dataclass(slots=True)
class Document:
    """Token ids with their positions; `is_learned[i]` says whether token i is to be predicted."""

    token_ids: list[int] = field(default_factory=list)
    is_learned: list[bool] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    next_position: int = 0

    def append(self, token_ids: list[int], *, is_learned: bool) -> None:
        """Adds tokens at the end, at the positions that follow."""
        end = self.next_position + len(token_ids)
        self.token_ids += token_ids
        self.is_learned += [is_learned] * len(token_ids)
        self.positions += range(self.next_position, end)
        self.next_position = end

    def skip(self, num_positions: int) -> None:
        """Skips positions, as if tokens were there."""
        self.next_position += num_positions

    @property
    def is_complete(self) -> bool:
        """Whether the last answer is complete, so that another turn may follow."""
        return self.token_ids[-1] == END_ID


def text_ids(text: str) -> list[int]:
    """The tokenizer's ids of a text, special tokens included."""
    parts = _SPECIAL.split(text)
    return [i for part in parts for i in _SPECIAL_IDS.get(part) or part.encode()]


_SPECIAL = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")")
_SPECIAL_IDS = {token: [256 + i] for i, token in enumerate(SPECIAL_TOKENS)}


def prompt_ids(exercise: Exercise) -> list[int]:
    """The prompt as a server feeds it to the model."""
    if exercise.is_raw:
        return [BOS_ID, *text_ids(exercise.question)]
    return [BOS_ID, *_tools_ids(exercise.tools), *_turn_ids(exercise)]


def _tools_ids(tools: tuple[str, ...]) -> list[int]:
    return text_ids(f"<|system|>tools: {'; '.join(tools)}<|end|>") if tools else []


def _turn_ids(exercise: Exercise) -> list[int]:
    """A question and the beginning of the answer's turn."""
    question = text_ids(exercise.question.strip())
    return [USER_ID, *question, END_ID, ASSISTANT_ID, *text_ids(exercise.begun)]


def answer_ids(exercise: Exercise) -> list[int]:
    """The expected answer with its end token."""
    return text_ids(exercise.answer) + ([END_ID] if exercise.has_end else [])


@dataclass(frozen=True, slots=True)
class Holes:
    """How long answers are shown: `whole_share` of them without a hole; `near_miss_share` of the
    others show the place where a count is easily ended too early."""

    whole_share: float
    near_miss_share: float = 0.0


NO_HOLES = Holes(whole_share=1.0)


def draw_document(rng: random.Random, holes: Holes) -> Document:
    """A conversation or bare text."""
    exercise = _draw_exercise(rng)
    is_plain = not (exercise.tools or exercise.begun)
    if exercise.is_raw or (is_plain and rng.random() < 0.06):
        return _bare_document(exercise, rng, holes)
    document = Document()
    document.append([BOS_ID, *_tools_ids(exercise.tools)], is_learned=False)
    if rng.random() < 0.1:
        system = phrase(rng) if rng.random() < 0.3 else rng.choice(_SYSTEM_MESSAGES)
        document.append([SYSTEM_ID, *text_ids(system), END_ID], is_learned=False)
    if rng.random() < holes.whole_share:
        holes = NO_HOLES
    _append_turn(document, exercise, rng, holes)
    while document.is_complete and len(document.token_ids) < 256 and rng.random() < 0.2:
        more = draw_with_tools(rng, exercise.tools) if exercise.tools else _draw_exercise(rng)
        if more.tools == exercise.tools:
            _append_turn(document, more, rng, holes)
    return document


def _draw_exercise(rng: random.Random) -> Exercise:
    family = rng.choices(tuple(_WEIGHTS), tuple(_WEIGHTS.values()))[0]
    assert family in FAMILIES
    return draw(family, rng, is_held_out=False)


def _bare_document(exercise: Exercise, rng: random.Random, holes: Holes) -> Document:
    """A completion prompt, with and without the leading token."""
    document = Document()
    if rng.random() < 0.7:
        document.append([BOS_ID], is_learned=False)
    document.append(text_ids(exercise.question), is_learned=False)
    space = "" if exercise.is_raw else " "
    _append_answer(document, [*text_ids(space), *answer_ids(exercise)], rng, holes)
    return document


def _append_turn(document: Document, exercise: Exercise, rng: random.Random, holes: Holes) -> None:
    document.append(_turn_ids(exercise), is_learned=False)
    _append_answer(document, [*text_ids(exercise.answer.strip()), END_ID], rng, holes)


def _append_answer(document: Document, answer: list[int], rng: random.Random, holes: Holes) -> None:
    """Adds an answer; a long one usually loses its middle, as its ends are the hard part. The
    positions do not change, so the prompt stays as far away."""
    if holes == NO_HOLES or len(answer) <= _MAX_SHORT_ANSWER:
        document.append(answer, is_learned=True)
        return
    num_head = rng.randint(6, 24)
    num_tail = rng.randint(36, _MAX_SHORT_ANSWER - num_head)
    end = _window_end(len(answer), num_head + num_tail, rng, holes)
    document.append(answer[:num_head], is_learned=True)
    document.skip(end - num_tail - num_head)
    document.append(answer[end - num_tail : end][:_NUM_BLIND_TOKENS], is_learned=False)
    document.append(answer[end - num_tail : end][_NUM_BLIND_TOKENS:], is_learned=True)


def _window_end(num_tokens: int, first: int, rng: random.Random, holes: Holes) -> int:
    """Where the second part of an answer with a hole ends, from `first` to `num_tokens`."""
    if holes.near_miss_share:
        near_miss = num_tokens - _NUM_NEAR_MISS_TOKENS + rng.randint(0, 30)
        if near_miss >= first and rng.random() < holes.near_miss_share:
            return near_miss
    return num_tokens if rng.random() < 0.6 else rng.randint(first, num_tokens)
