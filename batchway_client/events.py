"""A job's stream: its bytes as events, and where to go on when it breaks. Opens no connection."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from batchway_client.jobs import TERMINAL

_DONE = "[DONE]"
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `type` is `message` for the endpoint's own chunks, `queued`, `stream_reset` (what
    follows starts again from the beginning), or the status in which the job has ended.
    """

    type: str
    data: dict[str, Any]
    id: str | None = None

    @property
    def is_end(self) -> bool:
        return self.type in TERMINAL


class Parser:
    """Bytes of one connection to events, as they become whole."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        for block in blocks:
            event = _event(block.decode())
            if event is not None:
                yield event


def _event(block: str) -> Event | None:
    fields: dict[str, str] = {}
    for line in block.split("\n"):
        name, _, value = line.partition(":")
        if name:
            fields[name] = value.removeprefix(" ")
    data = fields.get("data", _DONE)
    if data == _DONE:  # or a comment
        return None
    return Event(fields.get("event", "message"), json.loads(data), fields.get("id"))


class Position:
    """Where a follower stands, over as many connections as it takes."""

    def __init__(self, after: str | None) -> None:
        self._last_id = after
        self._num_failures = 0

    @property
    def headers(self) -> dict[str, str]:
        return {} if self._last_id is None else {"last-event-id": self._last_id}

    def heard(self) -> None:
        """Something came: the next pause is short again."""
        self._num_failures = 0

    def next_pause_s(self) -> float:
        """How long to wait before the next connection."""
        pause_s: float = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._num_failures)
        self._num_failures += 1
        return pause_s

    def take(self, event: Event) -> bool:
        """Whether the event is for the caller; remembers to go on after it."""
        if event.type == "reconnect":
            return False
        if event.type == "stream_reset":
            self._last_id = None
        elif event.id is not None:
            self._last_id = event.id
        return True
