"""Draws random exercises by family."""

import random
from collections.abc import Callable
from dataclasses import replace

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


def _tools(rng: random.Random) -> tuple[str, ...]:
    """One or both of the tools that the model knows, sometimes beside one that it does not."""
    known = rng.sample(tasks.TOOLS, rng.choice((1, 2, 2)))
    names = [made_up_word(rng) for _ in range(rng.randint(1, 3))]
    unknown = [f"{names[0]}({', '.join(names[1:])})"] if rng.random() < 0.2 else []
    return tuple(rng.sample(known + unknown, len(known + unknown)))


def _for_a_tool(rng: random.Random, tools: tuple[str, ...]) -> Exercise:
    """A question that one of `tools` answers."""
    if tasks.TOOLS[1] not in tools or (tasks.TOOLS[0] in tools and rng.random() < 0.5):
        largest = rng.choice((tasks.MAX_SUMMAND, tasks.MAX_ARGUMENT))
        left, right = rng.randint(0, largest), rng.randint(0, largest)
        return tasks.add(left, right, _phrasing(rng, 5))
    return tasks.spell(_word(rng), _phrasing(rng, 4))


def _call(rng: random.Random, tools: tuple[str, ...]) -> Exercise:
    return tasks.call(_for_a_tool(rng, tools), tools)


def _read(rng: random.Random, tools: tuple[str, ...]) -> Exercise:
    """Mostly the right result; sometimes another text, so that it is copied."""
    exercise = _for_a_tool(rng, tools)
    result = phrase(rng) if rng.random() < 0.15 else exercise.answer
    return tasks.read(exercise, tools, result)


_WITHOUT_TOOL = ("count up", "reverse", "capitals", "letter", "subtract", "compare", "calendar")


def _no_tool_needed(rng: random.Random, tools: tuple[str, ...]) -> Exercise:
    """A question that no tool of `tools` answers."""
    families = [*_WITHOUT_TOOL, "talk", "beyond"]
    families += ["add"] * (tasks.TOOLS[0] not in tools) + ["spell"] * (tasks.TOOLS[1] not in tools)
    exercise = FAMILIES[rng.choice(families)](rng)
    return replace(exercise, family="no tool needed", tools=tools)


def draw_with_tools(rng: random.Random, tools: tuple[str, ...]) -> Exercise:
    """A training exercise of a conversation that shows `tools`."""
    while True:
        exercise = rng.choice((_call, _read, _no_tool_needed))(rng, tools)
        if not exercise.is_held_out:
            return exercise


def _for_json(rng: random.Random) -> Exercise:
    return FAMILIES[rng.choice(("add", "compare", "spell", "reverse", "capitals", "letter"))](rng)


def _schema(rng: random.Random) -> Exercise:
    key = rng.choice(("answer", "result", "value", "number", "word", made_up_word(rng)))
    return tasks.in_schema(_for_json(rng), key)


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
    "call a tool": lambda rng: _call(rng, _tools(rng)),
    "read a result": lambda rng: _read(rng, _tools(rng)),
    "no tool needed": lambda rng: _no_tool_needed(rng, _tools(rng)),
    "JSON": lambda rng: tasks.in_json(_for_json(rng)),
    "schema": _schema,
}
