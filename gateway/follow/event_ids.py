"""A client's position in a job's log: `Last-Event-ID`, or `?starting_after=`."""

from typing import Annotated

import msgspec
from fastapi import Depends, Header, Query


class LogPosition(msgspec.Struct, frozen=True):
    """The number of the last event that a client has, and the log's hash at that event if known."""

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
    """The position in the request. Raises ApiError if it is malformed."""
    number, _, hash_ = (last_event_id or starting_after).partition(".")
    return LogPosition(int(number), hash_ or None) if number else START


AskedPosition = Annotated[LogPosition, Depends(asked_position)]
