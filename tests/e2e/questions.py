"""Questions for the demo model, and the Redis keys of its jobs."""

from typing import Any

from contract.keys import Keys

MODEL = "demo"
KEYS = Keys("e2e")
LONG_COUNT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count from 1 to 200."}],
    "temperature": 0,
}


def count(first: int, last: int) -> str:
    """The right answer to `Count from first to last.`"""
    return ", ".join(map(str, range(first, last + 1)))
