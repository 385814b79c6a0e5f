"""Parses a job's event stream, tracks the position to resume from, and verifies callbacks. Opens no
connection."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchway_client.errors import BadSignature, ConnectionLost
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
    """Splits the bytes of one connection into events. `is_done`: the last one, [DONE], has come;
    `is_empty`: as the first one, as nothing follows the event that was asked for."""

    def __init__(self) -> None:
        self.is_done = self.is_empty = False
        self._num_events = 0
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        """Raises ValueError if data is no JSON."""
        *blocks, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in blocks:
            lines = (line.partition(":") for line in block.decode().split("\n"))
            fields = {name: value.removeprefix(" ") for name, _, value in lines if name}
            text = fields.get("data")  # a comment has none
            self.is_done |= text == _DONE
            self.is_empty |= text == _DONE and not self._num_events
            if text is not None and text != _DONE:
                self._num_events += 1
                yield Event(fields.get("event", "message"), json.loads(text), fields.get("id"))


class Position:
    """The last event that was received, and the connections that failed since.

    `max_outage_s`: after so long without an event there is no other connection.
    """

    def __init__(self, after: str | None, max_outage_s: float) -> None:
        self.is_end = False
        self._last_id = after
        self._max_outage_s = max_outage_s
        self._received_s = time.monotonic()
        self._pause_s = _FIRST_PAUSE_S

    @property
    def headers(self) -> dict[str, str]:
        return {} if self._last_id is None else {"last-event-id": self._last_id}

    def take(self, events: Iterable[Event]) -> Iterator[Event]:
        """Records the events, and yields those that are for the caller."""
        for event in events:
            self._received_s, self._pause_s = time.monotonic(), _FIRST_PAUSE_S
            if event.type == "stream_reset":
                self._last_id = None
            elif event.type != "reconnect":
                self._last_id = event.id or self._last_id
            self.is_end = event.is_end
            if event.type != "reconnect":
                yield event

    def pause_s(self, error: Exception | None) -> float:
        """Seconds to wait before the next connection, doubled with each call. Raises ConnectionLost
        because of `error`."""
        if time.monotonic() - self._received_s > self._max_outage_s:
            raise ConnectionLost(f"no gateway reached for {self._max_outage_s:g} s") from error
        pause_s = self._pause_s
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        return pause_s


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
