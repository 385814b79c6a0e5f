"""Turns for work that comes before the queue: rendering, tokenising, compiling.

A few things are done at a time. It is the turn of the owner that has had the least time for its
weight. An owner has at most half of the places, and the last one is for an owner that has none, so
another one's work begins at once. Long bodies have places of their own, because a slow client holds
one for as long as it sends.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar

import msgspec

from contract.errors import BatchwayError
from contract.fair_shares import FairShares

NUM_PLACES = 4
NUM_UPLOADS, UPLOADS_EACH = 16, 4  # long bodies that are read at a time: of all, of one owner
# What waits may hold, of all owners. One has at most as much as is free: alone, half.
MAX_WAITING_BYTES = 32 * 2**20
LEAST_WAITING_BYTES = 32 * 1024  # of a piece of work: its connection, its tasks and a short body
_UNATTENDED_WEIGHT = 1 / 8  # of work whose caller does not wait, which has one place
_MAX_IDLE = 1024  # owners without work that are remembered


class Busy(BatchwayError):
    """An owner's earlier work keeps its places for too long or fills the memory of what waits, or
    the machine is busy."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("earlier calls are being prepared")
        self.retry_after_s = retry_after_s


class Owner(msgspec.Struct, frozen=True):
    """Whose work it is. Nobody waits for the work of batches and flows."""

    tenant: str = ""
    weight: float = 1.0
    is_attended: bool = True


class _Line(msgspec.Struct):
    """An owner's work, running and waiting."""

    owner: Owner
    share: int  # places that it may have
    num_running: int = 0
    mean_s: float = 0.0
    num_bytes: int = 0  # that its waiting work holds
    waiting: deque[asyncio.Future[None]] = msgspec.field(default_factory=deque)


class Turns:
    """The places of one gateway. An owner may have `share` of them at a time; 0: half. `clock`:
    seconds."""

    def __init__(
        self,
        num_places: int = NUM_PLACES,
        share: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_free = num_places
        self._num_kept = int(num_places > 2)  # for owners whose caller waits and that have none
        self._share = share or max(1, num_places // 2)
        self._num_free_bytes = MAX_WAITING_BYTES
        self._clock = clock
        self._lines: dict[Owner, _Line] = {}
        self._times: FairShares[Owner] = FairShares()

    @asynccontextmanager
    async def turn(self, owner: Owner) -> AsyncIterator[None]:
        """Waits for the owner's turn, then holds a place. Raises Busy."""
        line = self._line_of(owner)
        self._times.arrive(owner, owner.weight * (1.0 if owner.is_attended else _UNATTENDED_WEIGHT))
        try:
            if not line.waiting and self._may_begin(line):
                self._begin(line)
            else:
                await self._wait(line)
            begun_s = self._clock()
            try:
                yield
            finally:
                self._end(line, self._clock() - begun_s)
        finally:
            self._times.leave(owner)

    def _may_begin(self, line: _Line) -> bool:
        """Whether there is a place for more of an owner's work."""
        is_first = line.num_running == 0 and line.owner.is_attended
        room = self._num_free - (0 if is_first else self._num_kept)
        return room > 0 and line.num_running < line.share

    def _line_of(self, owner: Owner) -> _Line:
        line = self._lines.get(owner)
        if line is None:
            if len(self._lines) >= _MAX_IDLE:
                self._forget_idle()
            line = self._lines[owner] = _Line(owner, self._share if owner.is_attended else 1)
        return line

    def _forget_idle(self) -> None:
        for owner, line in list(self._lines.items()):
            if not line.num_running and not line.waiting:
                del self._lines[owner]

    async def _wait(self, line: _Line) -> None:
        """Waits for a place, until the call's deadline. Raises Busy."""
        num_bytes = max(LEAST_WAITING_BYTES, _NUM_BYTES.get())
        if line.num_bytes + num_bytes > self._num_free_bytes:
            raise Busy(self._retry_s(line))
        turn = asyncio.get_running_loop().create_future()
        line.waiting.append(turn)
        line.num_bytes += num_bytes
        self._num_free_bytes -= num_bytes
        try:
            async with asyncio.timeout_at(_DEADLINE.get()):
                await turn
        except BaseException as exc:
            if turn.done() and not turn.cancelled():
                self._end(line, 0.0)  # the turn came as its owner left
            elif turn in line.waiting:
                line.waiting.remove(turn)
            if isinstance(exc, TimeoutError):
                raise Busy(self._retry_s(line)) from None
            raise
        finally:
            line.num_bytes -= num_bytes
            self._num_free_bytes += num_bytes

    def _retry_s(self, line: _Line) -> float:
        return math.ceil(max(1.0, line.mean_s * len(line.waiting) / line.share))

    def _begin(self, line: _Line) -> None:
        self._num_free -= 1
        line.num_running += 1

    def _end(self, line: _Line, took_s: float) -> None:
        self._num_free += 1
        line.num_running -= 1
        self._times.charge(line.owner, took_s)
        line.mean_s += (took_s - line.mean_s) / 8
        while self._num_free:
            ready = [
                each for each in self._lines.values() if each.waiting and self._may_begin(each)
            ]
            if not ready:
                return
            first = min(ready, key=lambda line: self._times.served[line.owner])
            turn = first.waiting.popleft()
            if not turn.cancelled():  # its owner may just have left
                self._begin(first)
                turn.set_result(None)


class ConcurrencyCap:
    """Limits how many things a name may have at a time: connections of an address, calls of a key.

    Counts of one process. `cap` 0 means no limit. Names whose count is 0 are not stored."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._num_of: Counter[str] = Counter()

    def enter(self, name: str) -> bool:
        """Counts one more. False if the name has as many as it may."""
        if self.cap and self._num_of[name] >= self.cap:
            return False
        self._num_of[name] += 1
        return True

    def leave(self, name: str) -> None:
        self._num_of[name] -= 1
        if not self._num_of[name]:
            del self._num_of[name]


_TURNS: ContextVar[Turns | None] = ContextVar("turns", default=None)
_OWNER: ContextVar[Owner | None] = ContextVar("owner", default=None)
_PLACE: ContextVar[AsyncExitStack | None] = ContextVar("place", default=None)
_DEADLINE: ContextVar[float | None] = ContextVar("deadline", default=None)  # by the loop's clock
_NUM_BYTES: ContextVar[int] = ContextVar("num_bytes", default=0)


def take_turns(turns: Turns, owner: Owner | None = None, wait_s: float | None = None) -> None:
    """From here on this task, and those that it starts, take their turns from `turns`, and work for
    the owner. All their waits together end after `wait_s`."""
    _TURNS.set(turns)
    work_for(owner, wait_s)


def work_for(owner: Owner | None, wait_s: float | None = None) -> None:
    """From here on this task, and those that it starts, work for this owner. `wait_s`: as for
    `take_turns`."""
    _OWNER.set(owner)
    _DEADLINE.set(None if wait_s is None else asyncio.get_running_loop().time() + wait_s)
    _NUM_BYTES.set(0)


def hold(num_bytes: int) -> None:
    """This task, and those that it starts, hold a body of this size while they wait."""
    _NUM_BYTES.set(num_bytes)


def current_owner() -> Owner:
    """For whom this task works."""
    return _OWNER.get() or Owner()


async def keep_place(turns: Turns) -> None:
    """Waits for a place and keeps it until `end_place`, also in tasks that this one starts. Raises
    Busy."""
    kept = AsyncExitStack()
    await kept.enter_async_context(turns.turn(current_owner()))
    _PLACE.set(kept)


async def end_place() -> None:
    """Gives back the place that `keep_place` took, if there is one."""
    if (kept := _PLACE.get()) is not None:
        await kept.aclose()


@asynccontextmanager
async def turn(default: Turns) -> AsyncIterator[Owner]:
    """Waits for the turn of this task's owner, which it yields, in the task's own `Turns` or the
    default ones. Raises Busy."""
    owner = current_owner()
    async with (_TURNS.get() or default).turn(owner):
        yield owner
