"""What came of one attempt to deliver a message."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver has it."""

    note: str


@dataclass(frozen=True, slots=True)
class Failed:
    """It may succeed later. `retry_after_s`: what the receiver asked for."""

    note: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """It will not succeed unless something is changed: a dead letter at once."""

    note: str


Outcome = Delivered | Failed | Refused
