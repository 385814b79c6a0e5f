"""Draws random exercises by family."""

import random
from collections.abc import Callable

from training import tasks
from training.tasks import Exercise
from training.words import ENGLISH_WORDS, made_up_word, phrase, phrase_beyond_ascii

_BEYOND = (
    "Tell me a joke about a {}.", "Write a poem about {}.", "What is the capital of {}?",
    "Who invented the {}?", "Why is the {} so {}?", "Translate {} into French.",
    "Explain {} to me.", "How do I cook {}?", "What does {} mean?",
    "Write a story about {} and {}.",
    "How old is {}?", "Where is {}?", "When did {} begin?", "Write code that sorts {}.",
    "Summarize {}.", "Is {} better than {}?", "Describe a {} in one sentence.",
    "What do you think of {}?", "How far is it from {} to {}?", "Can you help me with my {}?",
)  # fmt: skip


def draw(family: str, rng: random.Random, *, is_held_out: bool) -> Exercise:
    """An exercise of `family` that is, or is not, excluded from training."""
    while True:
        exercise = FAMILIES[family](rng)
        if exercise.is_held_out == is_held_out or family == "talk":
            return exercise


def _phrasing(rng: random.Random, num_phrasings: int) -> int:
    """The first phrasing half of the time."""
    return 0 if rng.random() < 0.5 else rng.randrange(num_phrasings)


def _word(rng: random.Random) -> str:
    return rng.choice(ENGLISH_WORDS) if rng.random() < 0.1 else made_up_word(rng)


def _first(rng: random.Random, num_steps: int) -> int:
    """The smaller end of a count, often a small number."""
    largest = rng.choice((1, 20, 100, 150, tasks.MAX_NUMBER, tasks.MAX_NUMBER, tasks.MAX_NUMBER))
    return rng.randint(0, min(largest, tasks.MAX_NUMBER - num_steps))


def _count_up(rng: random.Random) -> Exercise:
    num_steps = rng.randint(0, rng.choice((3, 6, 12, 25, 50, 99)))
    first = _first(rng, num_steps)
    return tasks.count(first, first + num_steps, _phrasing(rng, 3))


def _count_down(rng: random.Random) -> Exercise:
    num_steps = rng.randint(1, rng.choice((3, 6, 12, 25, 50, 99)))
    last = _first(rng, num_steps)
    return tasks.count(last + num_steps, last, _phrasing(rng, 3))


def _long_count_up(rng: random.Random) -> Exercise:
    num_steps = rng.choice((rng.randint(99, tasks.MAX_COUNT - 1), tasks.MAX_COUNT - 1))
    first = _first(rng, num_steps)
    return tasks.count(first, first + num_steps, _phrasing(rng, 3))


def _long_count_down(rng: random.Random) -> Exercise:
    num_steps = rng.choice((rng.randint(99, tasks.MAX_COUNT - 1), tasks.MAX_COUNT - 1))
    last = _first(rng, num_steps)
    return tasks.count(last + num_steps, last, _phrasing(rng, 3))


def _add(rng: random.Random) -> Exercise:
    largest = rng.choice((9, tasks.MAX_SUMMAND, tasks.MAX_SUMMAND, tasks.MAX_SUMMAND))
    left, right = rng.randint(0, largest), rng.randint(0, tasks.MAX_SUMMAND)
    if rng.random() < 0.5:
        left, right = right, left
    return tasks.add(left, right, _phrasing(rng, 5))


def _subtract(rng: random.Random) -> Exercise:
    right, left = sorted(rng.randint(0, tasks.MAX_SUMMAND) for _ in range(2))
    return tasks.subtract(left, right, _phrasing(rng, 5))


def _compare(rng: random.Random) -> Exercise:
    left = rng.randint(0, rng.choice((99, tasks.MAX_NUMBER)))
    right = rng.randint(0, rng.choice((99, tasks.MAX_NUMBER)))
    if rng.random() < 0.3:  # close together, so that the last digits decide
        right = min(tasks.MAX_NUMBER, max(0, left + rng.randint(-15, 15)))
    if left == right:
        return _compare(rng)
    return tasks.compare(left, right, _phrasing(rng, 4))


def _calendar(rng: random.Random) -> Exercise:
    name = rng.choice(rng.choice((tasks.DAYS, tasks.MONTHS)))
    return tasks.calendar(name, rng.random() < 0.5, _phrasing(rng, 8))


def _repeat(rng: random.Random) -> Exercise:
    return tasks.repeat(phrase(rng), _phrasing(rng, 3))


def _repeat_beyond_ascii(rng: random.Random) -> Exercise:
    return tasks.repeat(phrase_beyond_ascii(rng), _phrasing(rng, 3))


def _continue(rng: random.Random) -> Exercise:
    num_given, num_more = rng.randint(2, 8), rng.choice((5, 10, 20))
    if rng.random() < 0.2:
        names = rng.choice((tasks.DAYS, tasks.MONTHS))
        return tasks.continue_names(names, rng.randrange(len(names)), num_given, num_more)
    first = _first(rng, num_given + num_more - 1)
    return tasks.continue_count(first, num_given, num_more)


def _talk(rng: random.Random) -> Exercise:
    return tasks.talk(rng.choice(tuple(tasks.TALK)))


def _beyond(rng: random.Random) -> Exercise:
    words = (_word(rng), _word(rng))
    return tasks.beyond(rng.choice(_BEYOND).format(*words))


FAMILIES: dict[str, Callable[[random.Random], Exercise]] = {
    "count up": _count_up,
    "count down": _count_down,
    "long count up": _long_count_up,
    "long count down": _long_count_down,
    "spell": lambda rng: tasks.spell(_word(rng), _phrasing(rng, 4)),
    "reverse": lambda rng: tasks.reverse(_word(rng), _phrasing(rng, 4)),
    "capitals": lambda rng: tasks.capitals(_word(rng), _phrasing(rng, 3)),
    "letter": lambda rng: tasks.letter(_word(rng), rng.randrange(4)),
    "add": _add,
    "subtract": _subtract,
    "compare": _compare,
    "calendar": _calendar,
    "repeat": _repeat,
    "repeat beyond ASCII": _repeat_beyond_ascii,
    "continue": _continue,
    "talk": _talk,
    "beyond": _beyond,
}
