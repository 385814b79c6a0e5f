"""What is paused: a typed call for each Redis Function of pauses (lua/_pauses.lua).

New jobs of a paused lane or tenant are refused with `lane_paused`, waiting ones stay in order.
"""

from typing import Any, Literal

import msgspec

from contract.connection import broker_errors
from contract.library import Partition

PausedBy = Literal["operator", "tenant"]
_ALL = "*"


class PauseLine(msgspec.Struct, frozen=True):
    """What a pause holds: the jobs of a model, a lane and a tenant; empty: of all."""

    model: str = ""
    lane: str = ""
    tenant: str = ""

    @property
    def words(self) -> tuple[str, str, str]:
        """As the functions take it."""
        return self.model or _ALL, self.lane or _ALL, self.tenant or _ALL


class Pause(msgspec.Struct, frozen=True):
    """A pause, the time of its beginning by the Redis clock, and who may end it."""

    line: PauseLine
    since_ms: int
    by: PausedBy


class TooManyPauses(Exception):
    """Tenants have as many pauses as they may."""


class PausedByOperator(Exception):
    """A tenant may not end this pause."""


class Pauses(Partition):
    """The pauses of one partition. Every call may be repeated, and raises BrokerUnavailable and
    CommandDenied."""

    async def pause(self, line: PauseLine, by: PausedBy) -> Pause:
        """Returns the pause, which may have begun before. Raises TooManyPauses."""
        reply = await self._call("pause", *line.words, by)
        if reply == [b"FULL"]:
            raise TooManyPauses
        _, since_ms, raw_by = reply
        return Pause(line, since_ms, _by(raw_by.decode()))

    async def resume(self, line: PauseLine, by: PausedBy) -> bool:
        """Ends a pause; False where there is none. Raises PausedByOperator."""
        [verdict] = await self._call("resume", *line.words, by)
        if verdict == b"DENIED":
            raise PausedByOperator
        return bool(verdict == b"OK")

    async def all(self) -> list[Pause]:
        """All pauses, the oldest first. Raises WireError."""
        with broker_errors(self._client, "HGETALL", record="pause"):
            raw: Any = await self._client.hgetall(self._keys.of("paused"))
            return sorted(map(_pause, raw, raw.values()), key=lambda pause: pause.since_ms)


def _pause(field: bytes, value: bytes) -> Pause:
    words = ("" if word == _ALL else word for word in field.decode().split(" ", 2))
    since_ms, by = value.decode().split(" ")
    return Pause(PauseLine(*words), int(since_ms), _by(by))


def _by(word: str) -> PausedBy:
    return "operator" if word == "operator" else "tenant"
