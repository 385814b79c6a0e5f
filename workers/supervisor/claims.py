"""When a worker claims jobs, and how many: while it has room, and before the step in which a
running job ends."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from contract.errors import BrokerUnavailable
from contract.function_types import Claimed, LaneRoom
from workers.settings import WorkerSettings
from workers.supervisor.holding import Holding
from workers.supervisor.worker_broker import WorkerBroker

log = logging.getLogger(__name__)

POLL_S = 1.0  # between claims without a wake-up message, as messages may be lost


@dataclass(eq=False)
class Claims:
    """The claims of one worker. `clock_s` is that of the holding's times."""

    _settings: WorkerSettings
    _broker: WorkerBroker
    _holding: Holding
    _clock_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._checked_s = 0.0  # when room was last checked
        self._has_lost_reply = False
        self._again_s = math.inf  # when jobs that were left to others are left no more
        self.read_terms()

    def read_terms(self) -> None:
        """Takes the lanes of the engine's options as they are now."""
        self._terms = self._settings.lane_terms(self._holding.engine.options)

    @property
    def rest_s(self) -> float:
        """Seconds until the next claim is due if nothing wakes the worker before."""
        now_s = self._clock_s()
        left_s = max(0.0, self._again_s - now_s)
        return min(POLL_S, left_s, self._holding.rest_s(now_s, self._checked_s))

    async def wait_for_wake(self) -> None:
        """Waits until there may be a job and room for it, or the next claim is due."""
        wake = self._holding.wake
        poll = asyncio.get_running_loop().call_later(self.rest_s, wake.set)
        await wake.wait()
        poll.cancel()
        wake.clear()

    def rooms(self) -> dict[str, LaneRoom]:
        self._checked_s = self._clock_s()
        return self._holding.rooms(self._terms, self._checked_s)

    async def claim_while_room(
        self, start: Callable[[list[Claimed]], Awaitable[None]], is_over: Callable[[], bool]
    ) -> dict[str, LaneRoom]:
        """Claims and starts jobs until nothing that waits fits. Returns the room of each lane that
        it has left to fill. Raises BrokerUnavailable, WireError, CommandDenied, and what `start`
        raises."""
        await self.recover(start)
        self._again_s = math.inf  # a worker without room has nothing to ask again
        while not is_over():
            rooms = self.rooms()
            if not rooms:
                break
            num_places = await self.claim(rooms, start)
            if num_places < max(1, *(room.max_jobs for room in rooms.values())):
                self.note_room()
                return rooms  # no other waiting job fits
        return {}

    async def recover(self, start: Callable[[list[Claimed]], Awaitable[None]]) -> None:
        """Starts the jobs of a claim whose reply was lost, if one was."""
        if self._has_lost_reply and self._holding.engine.ready is not None:
            await start(await self._broker.mine(list(self._holding.jobs)))
            self._has_lost_reply = False

    async def claim(
        self, rooms: dict[str, LaneRoom], start: Callable[[list[Claimed]], Awaitable[None]]
    ) -> int:
        """Claims once and starts the jobs. Returns the places that they fill."""
        holding, engine, started_s = self._holding, self._holding.engine, self._clock_s()
        assert engine.ready is not None, "without an engine there is no room"
        try:
            claimed = await self._broker.claim(
                lanes={name: lane.min_share for name, lane in self._terms.items()},
                rooms=rooms,
                free_tokens=engine.load.num_free_blocks * engine.ready.block_size,
                is_idle=not holding.jobs,
                config_version=engine.options.batching_version,
                prompt_token_s=engine.prompts.token_s if engine.options.prefix_caching else None,
            )
            again_s = claimed.again_s
            self._again_s = math.inf if again_s is None else self._clock_s() + again_s
            await start(claimed)
        except BrokerUnavailable:
            self._has_lost_reply = True  # the call may have claimed jobs
            raise
        engine.steps.note_claim(self._clock_s() - started_s)
        return sum(job.job.num_places for job in claimed)

    def note_room(self) -> None:
        if self._holding.room(self._clock_s()) is not None:
            self._holding.engine.speed.note_room()
