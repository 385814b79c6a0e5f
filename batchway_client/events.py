"""Parses a job's event stream, tracks the position to resume from, and verifies callbacks. Opens no
connection."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchway_client.errors import BadSignature
from batchway_client.jobs import TERMINAL

_DONE = "[DONE]"
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `type` is `message` (a chunk in the endpoint's format), `queued`, `stream_reset`
    (the output starts again from the beginning), or the final status of the job.
    """

    type: str
    data: dict[str, Any]
    id: str | None = None

    @property
    def is_end(self) -> bool:
        return self.type in TERMINAL


class Parser:
    """Splits the bytes of one connection into events."""

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
    if data == _DONE:  # also for a comment, which has no data
        return None
    return Event(fields.get("event", "message"), json.loads(data), fields.get("id"))


class Position:
    """The last event that was received, and the number of failed connections since."""

    def __init__(self, after: str | None) -> None:
        self._last_id = after
        self._num_failures = 0

    @property
    def headers(self) -> dict[str, str]:
        return {} if self._last_id is None else {"last-event-id": self._last_id}

    def received(self) -> None:
        """Resets the pause before the next connection."""
        self._num_failures = 0

    def next_pause_s(self) -> float:
        """Seconds to wait before the next connection; doubles with each call."""
        pause_s: float = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._num_failures)
        self._num_failures += 1
        return pause_s

    def take(self, event: Event) -> bool:
        """Records the event's id; returns whether to pass the event to the caller."""
        if event.type == "reconnect":
            return False
        if event.type == "stream_reset":
            self._last_id = None
        elif event.id is not None:
            self._last_id = event.id
        return True


def verify_webhook(secret: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Verifies a callback's signature (https://www.standardwebhooks.com) and returns its content.
    Raises BadSignature.

    `secret` begins with `whsec_`; `body` is the request's body, unchanged. A callback may be
    delivered more than once, each time with the same `webhook-id` header.
    """
    from standardwebhooks.webhooks import Webhook, WebhookVerificationError

    try:
        content: dict[str, Any] = Webhook(secret).verify(body, dict(headers))
    except WebhookVerificationError as exc:
        raise BadSignature(str(exc)) from exc
    except ValueError as exc:  # a malformed header, or a body that is not UTF-8 text
        raise BadSignature("the delivery cannot be read") from exc
    return content
