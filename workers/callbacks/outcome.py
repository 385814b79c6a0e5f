"""The outcome of one delivery attempt."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver accepted it."""

    note: str


@dataclass(frozen=True, slots=True)
class Failed:
    """It may succeed later. `retry_after_s`: the receiver's request."""

    note: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A retry cannot succeed: becomes a dead letter at once."""

    note: str


Outcome = Delivered | Failed | Refused
