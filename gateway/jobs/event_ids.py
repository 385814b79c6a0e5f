"""Where a reader of a log stands, as callers say it: `Last-Event-ID`, or `?starting_after=`."""

from typing import Annotated

import msgspec
from fastapi import Depends, Header, Query


class LogPosition(msgspec.Struct, frozen=True):
    """The last event that a caller has, and the hash of the log there where it said so."""

    number: int = 0
    hash: str | None = None

    @property
    def sse_id(self) -> str:
        return f"{self.number}.{self.hash}" if self.hash else str(self.number)


START = LogPosition()


_PATTERN = r"^([0-9]{1,9}(\.[0-9a-f]{8})?)?$"


async def asked_position(
    last_event_id: Annotated[
        str,
        Header(
            alias="Last-Event-ID", pattern=_PATTERN, description="go on with a stream after this"
        ),
    ] = "",
    starting_after: Annotated[
        str, Query(pattern=_PATTERN, description="the same as Last-Event-ID, which wins")
    ] = "",
) -> LogPosition:
    """Where a reader of a stream stands."""
    number, _, hash_ = (last_event_id or starting_after).partition(".")
    return LogPosition(int(number), hash_ or None) if number else START


AskedPosition = Annotated[LogPosition, Depends(asked_position)]
