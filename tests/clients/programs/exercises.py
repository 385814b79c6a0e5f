"""Runs a client's exercises, and prints the result of each as a line of JSON. Its environment
has the client and nothing of this project."""

import json
import os
import sys
from collections.abc import Callable, Iterable

URL = os.environ.get("CLIENTS_URL", "")
BASE_URL = f"{URL}/v1"
MODEL = os.environ.get("CLIENTS_MODEL", "demo")
REASONS = MODEL != "demo"
EMBEDDER, RERANKER = "embedder", "reranker"
QUESTION, ANSWER = "Count from 1 to 5.", "1, 2, 3, 4, 5"
KEY = "no-key-is-asked-for"
SUM, TOTAL = "What is 27 + 58?", 85  # within RESPONSE_FORMAT
VALUE = {"type": "integer", "minimum": 0, "maximum": 198}
SCHEMA = {
    "type": "object",
    "properties": {"value": VALUE},
    "required": ["value"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "sum", "strict": True, "schema": SCHEMA},
}
LONG_SUM, LONG_TOTAL = "What is 1234 + 5678?", 6912  # too long for the model without its tool
ARGUMENTS = {"a": 1234, "b": 5678}
INTEGER = {"type": "integer"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": INTEGER, "b": INTEGER},
            "required": ["a", "b"],
        },
    },
}
DOCUMENTS = ["one", "two three", "four " * 30]
NOT_YET = (
    *("not supported", "there is no /v1/", "there is no /v2/"),
    "token ids must be",
)
_MAX_CHARS = 600

exercises: dict[str, tuple[Callable[[], object], bool]] = {}


def works(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """An exercise that must succeed, on each model. It raises if not."""
    return _noted(name, is_supported=True)


def works_on_demo(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """On the demo model alone, or on one for vectors."""
    return _noted(name, is_supported=True, is_meant=not REASONS)


def works_reasoning(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """On the model that reasons alone."""
    return _noted(name, is_supported=True, is_meant=REASONS)


def refused(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """An exercise that the server must reject as unsupported."""
    return _noted(name, is_supported=False, is_meant=not REASONS)


def _noted(
    name: str, *, is_supported: bool, is_meant: bool = True
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def note(exercise: Callable[[], object]) -> Callable[[], object]:
        if is_meant:
            exercises[name] = exercise, is_supported
        return exercise

    return note


REPEATED = QUESTION * 10  # asked twice, the model has computed its beginning


def is_cached(num_cached: int | None, num_prompt: int) -> None:
    """Raises unless a part of a prompt that was asked before was cached."""
    assert 0 < (num_cached or 0) < num_prompt, (num_cached, num_prompt)


def says(text: object) -> None:
    """Raises unless the answer is right, and nothing else."""
    assert str(text).strip() == ANSWER, text


def fits(text: str) -> None:
    """Raises unless the answer to SUM is right and matches the schema."""
    assert json.loads(text) == {"value": TOTAL}, text


def ranks(indexes: Iterable[int]) -> None:
    """Raises unless each document has a place."""
    found = list(indexes)
    assert sorted(found) == list(range(len(DOCUMENTS))), found


def error_of(kind: type[Exception], ask: Callable[[], object]) -> Exception:
    """The error that the call must raise."""
    try:
        ask()
    except kind as exc:
        return exc
    raise AssertionError(f"no {kind.__name__}")


def main(version: str) -> None:
    """Runs all exercises. Exits with 1 if one failed."""
    all_good = True
    for name, (exercise, is_supported) in exercises.items():
        try:
            exercise()
            error = "" if is_supported else "was not refused"
        except Exception as exc:
            text = f"{type(exc).__name__}: {exc}"
            is_refusal = not is_supported and any(words in text for words in NOT_YET)
            error = "" if is_refusal else text[-_MAX_CHARS:]
        all_good &= not error
        line = {"version": version, "name": name, "works": is_supported, "error": error}
        print(json.dumps(line), flush=True)
    sys.exit(not all_good)
