"""Runs a client's exercises, and prints the result of each as a line of JSON. Its environment
has the client and nothing of this project."""

import json
import os
import sys
from collections.abc import Callable

URL = os.environ.get("CLIENTS_URL", "")
BASE_URL = f"{URL}/v1"
MODEL = "demo"
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
NOT_YET = ("not supported", "only text parts", "there is no /v1/", "does not answer")
_MAX_CHARS = 600

exercises: dict[str, tuple[Callable[[], object], bool]] = {}


def works(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """An exercise that must succeed. It raises if not."""

    def note(exercise: Callable[[], object]) -> Callable[[], object]:
        exercises[name] = exercise, True
        return exercise

    return note


def refused(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """An exercise that the server must reject as unsupported."""

    def note(exercise: Callable[[], object]) -> Callable[[], object]:
        exercises[name] = exercise, False
        return exercise

    return note


def says(text: object) -> None:
    """Raises unless the answer is right."""
    assert str(text).strip() == ANSWER, text


def fits(text: str) -> None:
    """Raises unless the answer to SUM is right and matches the schema."""
    assert json.loads(text) == {"value": TOTAL}, text


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
