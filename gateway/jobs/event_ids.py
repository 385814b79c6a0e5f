"""Where a reader of a log stands, as callers say it: `Last-Event-ID`, or `?starting_after=`."""

import re

import msgspec
from fastapi import Request

from gateway.http.errors import invalid_value

_EVENT_ID = re.compile(r"(\d{1,9})(?:\.([0-9a-f]{8}))?")


class Position(msgspec.Struct, frozen=True):
    """The last event that a caller has, and the hash of the log there where it said so."""

    number: int = 0
    hash: str | None = None

    @property
    def sse_id(self) -> str:
        return f"{self.number}.{self.hash}" if self.hash else str(self.number)


START = Position()


def asked_position(request: Request) -> tuple[str, Position]:
    """The parameter that says it, and the position; the header wins. Raises ApiError."""
    header = request.headers.get("last-event-id")
    param = "starting_after" if header is None else "Last-Event-ID"
    event_id = header
    if header is None and request.scope["query_string"]:
        event_id = request.query_params.get("starting_after")
    if not event_id:
        return param, START
    match = _EVENT_ID.fullmatch(event_id.strip())
    if match is None:
        raise invalid_value(param, f"{param} must be an event's id: `12.89abcdef` or `12`")
    return param, Position(int(match[1]), match[2])
