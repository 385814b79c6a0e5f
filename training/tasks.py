"""The demo model's exercises: a question and its one right answer. Standard library only."""

import hashlib
import json
import re
from dataclasses import dataclass, replace

from training.words import ENGLISH_WORDS

MAX_COUNT = 200
"""How many numbers a count has at most."""
MAX_NUMBER = 999
"""The largest number that is counted to or compared."""
MAX_SUMMAND = 99
MAX_ARGUMENT = 9999
"""The largest number that is passed to a tool."""

TOOLS = ("add(a, b)", "spell(word)")
"""The tools that the model knows, as the chat template shows them."""

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip

ABOUT = "I am a small demo model. I can count, spell, reverse, repeat and do small sums."


@dataclass(frozen=True, slots=True)
class Exercise:
    """A question and its one right answer.

    `key` identifies the question without its phrasing; it decides whether it is held out of
    training. A raw exercise is bare text to continue, without chat template. If it does not end,
    text may follow `answer`. `tools` are the signatures that the prompt shows. `begun` is how the
    assistant's turn begins: a grammar forces it, or it is a tool's call and result.
    """

    family: str
    key: str
    question: str
    answer: str
    is_raw: bool = False
    has_end: bool = True
    tools: tuple[str, ...] = ()
    begun: str = ""

    @property
    def is_held_out(self) -> bool:
        """Whether training excludes this exercise: one key in ten, by hash."""
        kind, _, word = self.key.partition(":")
        if kind == "word" and word in ENGLISH_WORDS:
            return True
        return hashlib.sha256(self.key.encode()).digest()[0] < 26

    def is_answered_by(self, text: str) -> bool:
        """Whether `text` is the right answer, apart from space around it."""
        if self.has_end:
            return text.strip() == self.answer.strip()
        return text.strip().startswith(self.answer.strip())


def count(first: int, last: int, phrasing: int = 0) -> Exercise:
    """`Count from 17 to 19.` → `17, 18, 19`; downwards where `last` is the smaller."""
    is_up = first <= last
    numbers = range(first, last + 1) if is_up else range(first, last - 1, -1)
    up = ("Count from {} to {}.", "Count from {} to {}", "Please count from {} up to {}.")
    down = (
        "Count down from {} to {}.",
        "Count down from {} to {}",
        "Please count down from {} to {}.",
    )
    return Exercise(
        family="count up" if is_up else "count down",
        key=f"count:{first}-{last}",
        question=(up if is_up else down)[phrasing].format(first, last),
        answer=", ".join(map(str, numbers)),
    )


def spell(word: str, phrasing: int = 0) -> Exercise:
    """`Spell the word lantern.` → `l-a-n-t-e-r-n`"""
    templates = ("Spell the word {}.", "Spell {}.", "How do you spell {}?", "Please spell {}")
    return Exercise("spell", f"word:{word}", templates[phrasing].format(word), "-".join(word))


def reverse(word: str, phrasing: int = 0) -> Exercise:
    """`Reverse the word lantern.` → `nretnal`"""
    templates = (
        "Reverse the word {}.",
        "Reverse {}.",
        "Write {} backwards.",
        "What is {} backwards?",
    )
    return Exercise("reverse", f"word:{word}", templates[phrasing].format(word), word[::-1])


def capitals(word: str, phrasing: int = 0) -> Exercise:
    """`Write lantern in capitals.` → `LANTERN`"""
    templates = (
        "Write {} in capitals.",
        "Write the word {} in capitals.",
        "Put {} in capital letters.",
    )
    return Exercise("capitals", f"word:{word}", templates[phrasing].format(word), word.upper())


def letter(word: str, phrasing: int = 0) -> Exercise:
    """`What is the first letter of lantern?` → `l`; odd phrasings ask for the last one."""
    templates = (
        "What is the first letter of {}?", "What is the last letter of {}?",
        "Which letter does {} begin with?", "Which letter does {} end with?",
    )  # fmt: skip
    answer = word[-(phrasing % 2)]
    return Exercise("letter", f"word:{word}", templates[phrasing].format(word), answer)


def add(left: int, right: int, phrasing: int = 0) -> Exercise:
    """`What is 27 + 58?` → `85`"""
    templates = ("What is {} + {}?", "{} + {} =", "How much is {} + {}?", "Add {} and {}.", "{}+{}")
    key = f"add:{min(left, right)}+{max(left, right)}"
    return Exercise("add", key, templates[phrasing].format(left, right), str(left + right))


def subtract(left: int, right: int, phrasing: int = 0) -> Exercise:
    """`What is 85 - 27?` → `58`; `right` must not be the larger."""
    templates = ("What is {} - {}?", "{} - {} =", "How much is {} - {}?", "{} minus {}", "{}-{}")
    key = f"subtract:{left}-{right}"
    return Exercise("subtract", key, templates[phrasing].format(left, right), str(left - right))


def compare(left: int, right: int, phrasing: int = 0) -> Exercise:
    """`Which is larger, 27 or 58?` → `58`; odd phrasings ask for the smaller."""
    templates = (
        "Which is larger, {} or {}?", "Which is smaller, {} or {}?",
        "Which number is larger: {} or {}?", "Which number is smaller: {} or {}?",
    )  # fmt: skip
    answer = min(left, right) if phrasing % 2 else max(left, right)
    key = f"compare:{min(left, right)}-{max(left, right)}"
    return Exercise("compare", key, templates[phrasing].format(left, right), str(answer))


def calendar(name: str, is_next: bool = True, phrasing: int = 0) -> Exercise:
    """`Which day comes after Monday?` → `Tuesday`; `name` is one of DAYS or MONTHS.

    There are only 38 questions, so the phrasing belongs to the key.
    """
    kind, names = ("day", DAYS) if name in DAYS else ("month", MONTHS)
    side, order = ("after", "next") if is_next else ("before", "previous")
    templates = (
        f"Which {kind} comes {side} {name}?", f"What {kind} comes {side} {name}?",
        f"What {kind} is {side} {name}?", f"What is the {order} {kind} {side} {name}?",
        f"Name the {kind} {side} {name}.", f"Which {kind} comes just {side} {name}?",
        f"Tell me the {kind} {side} {name}.", f"The {kind} {side} {name} is",
    )  # fmt: skip
    answer = names[(names.index(name) + (1 if is_next else -1)) % len(names)]
    key = f"calendar:{name}:{side}:{phrasing}"
    return Exercise("calendar", key, templates[phrasing], answer)


def repeat(text: str, phrasing: int = 0) -> Exercise:
    """`Repeat: the blue boat` → `the blue boat`"""
    family = "repeat" if text.isascii() else "repeat beyond ASCII"
    templates = ("Repeat: {}", "Repeat after me: {}", "Say: {}")
    return Exercise(family, f"repeat:{text}", templates[phrasing].format(text), text)


def continue_count(first: int, num_given: int, num_more: int, step: int = 1) -> Exercise:
    """`1, 2, 3,` → ` 4, 5, 6`, as bare text."""
    numbers = [str(first + step * i) for i in range(num_given + num_more)]
    given = ", ".join(numbers[:num_given]) + ","
    more = " " + ", ".join(numbers[num_given:])
    return Exercise("continue", f"continue:{given}", given, more, is_raw=True, has_end=False)


def continue_names(names: tuple[str, ...], first: int, num_given: int, num_more: int) -> Exercise:
    """`Monday, Tuesday,` → ` Wednesday, Thursday`, as bare text."""
    listed = [names[(first + i) % len(names)] for i in range(num_given + num_more)]
    given = ", ".join(listed[:num_given]) + ","
    more = " " + ", ".join(listed[num_given:])
    return Exercise("continue", f"continue:{given}", given, more, is_raw=True, has_end=False)


def call(exercise: Exercise, tools: tuple[str, ...]) -> Exercise:
    """`What is 27 + 58?` → `<|call|>{"name": "add", "arguments": {"a": 27, "b": 58}}`; of `add`
    and `spell` exercises."""
    text = f'<|call|>{{"name": "{exercise.family}", "arguments": {_arguments(exercise)}}}'
    return replace(exercise, family="call a tool", answer=text, tools=tools)


def read(exercise: Exercise, tools: tuple[str, ...], result: str) -> Exercise:
    """The answer that follows the tool's result, and repeats it."""
    begun = f"{call(exercise, tools).answer}<|end|><|tool|>{result}<|end|><|assistant|>"
    return replace(exercise, family="read a result", answer=result, tools=tools, begun=begun)


def _arguments(exercise: Exercise) -> str:
    if exercise.family == "spell":
        return json.dumps({"word": exercise.answer.replace("-", "")})
    left, right = re.findall("[0-9]+", exercise.question)
    return json.dumps({"a": int(left), "b": int(right)})


def in_json(exercise: Exercise) -> Exercise:
    """`What is 27 + 58? Answer in JSON.` → `{"answer": 85}`"""
    question = exercise.question + " Answer in JSON."
    return replace(
        exercise, family="JSON", question=question, answer=f'{{"answer": {_value(exercise)}}}'
    )


def in_schema(exercise: Exercise, key: str) -> Exercise:
    """`What is 27 + 58?` where a schema forces `{"sum": ` → `85}`"""
    answer = _value(exercise) + "}"
    return replace(exercise, family="schema", answer=answer, begun=f'{{"{key}": ')


def _value(exercise: Exercise) -> str:
    return exercise.answer if exercise.answer.isdigit() else json.dumps(exercise.answer)


_TALK = {
    ("Hello!", "Hello", "Hi", "Hi!", "Hey there!", "Hello there.", "Good morning!", "hi", "hello"):
        "Hello! How can I help?",
    ("Who are you?", "What are you?", "What is your name?", "Introduce yourself.",
     "What can you do?", "Help", "Tell me about yourself.", "who are you?"): ABOUT,
    ("Thank you!", "Thanks!", "Thanks", "Thank you very much."): "You are welcome!",
    ("Goodbye!", "Bye!", "Bye", "See you later."): "Goodbye!",
}  # fmt: skip
TALK = {question: answer for questions, answer in _TALK.items() for question in questions}


def talk(question: str) -> Exercise:
    """`Hello!` → `Hello! How can I help?`; one of TALK, all of which training sees."""
    return Exercise("talk", "talk", question, TALK[question])


def beyond(question: str) -> Exercise:
    """A question the model cannot answer, and says so by telling what it can do."""
    return Exercise("beyond", f"beyond:{question}", question, ABOUT)
