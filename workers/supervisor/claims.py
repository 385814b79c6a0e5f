"""When a worker claims jobs, and how many: while it has room, and before the step in which a
running job ends."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from msgspec.structs import replace

from contract.errors import BrokerUnavailable
from contract.function_types import Claimed, LaneRoom
from workers.settings import WorkerSettings
from workers.supervisor.held_job import HeldJob
from workers.supervisor.holding import Holding
from workers.supervisor.rotation import Line, Rotation, Turn
from workers.supervisor.worker_broker import AllPartitions, WorkerBroker

log = logging.getLogger(__name__)

POLL_S = 1.0  # between claims without a wake-up message, as messages may be lost


class Claims:
    """The claims of one worker. `clock_s` is that of the holding's times."""

    def __init__(
        self,
        settings: WorkerSettings,
        broker: AllPartitions,
        holding: Holding,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._broker = broker
        self._holding = holding
        self._clock_s = clock_s
        self._checked_s = 0.0  # when room was last checked
        self.rotation = Rotation()
        self._lost_replies: set[int] = set()  # partitions
        self._look_at_s: dict[int, float] = {}
        self._suspects: dict[int, int] = {}  # 1: some wait; 2: this worker has the turn to run one
        broker.on_wake = self._note_wake
        holding.on_left = self._settle
        self.read_terms()

    def read_terms(self) -> None:
        """Takes the lanes of the engine's options as they are now."""
        self._terms = self._settings.lane_terms(self._holding.engine.options)

    @property
    def rest_s(self) -> float:
        """Seconds until the next claim is due if nothing wakes the worker before."""
        return min(POLL_S, self._holding.rest_s(self._clock_s(), self._checked_s))

    async def wait_for_wake(self) -> None:
        """Waits until there may be a job and room for it, or the next claim is due."""
        wake = self._holding.wake
        poll = asyncio.get_running_loop().call_later(self.rest_s, wake.set)
        await wake.wait()
        poll.cancel()
        wake.clear()

    @property
    def shares(self) -> dict[str, float]:
        """The minimum shares of lanes, the most urgent first."""
        return {name: lane.min_share for name, lane in self._terms.items()}

    # --- what waits in partitions, where there are several

    def _note_wake(self, partition: int) -> None:
        if not any(line[0] == partition for line in self.rotation.waiting):
            self._look_at_s[partition] = 0.0

    def _settle(self, job: HeldJob) -> None:
        self.rotation.settle(job.job.id, job.num_drained)

    def is_look_due(self, partition: int) -> bool:
        return self._clock_s() >= self._look_at_s.get(partition, 0.0)

    def look_again(self, partition: int) -> None:
        """In the next round."""
        self._look_at_s[partition] = 0.0

    def look_later(self, partition: int) -> None:
        """It does not answer."""
        self._look_at_s[partition] = self._clock_s() + POLL_S

    def note_look(self, partition: int, suspects: int, weights: dict[str, float]) -> None:
        self._look_at_s[partition] = self._clock_s() + _LOOK_S
        self._suspects[partition] = suspects
        self.rotation.note_waiting(partition, weights)

    def suspects(self, numbers: Iterable[int]) -> list[int]:
        """Partitions where suspects wait, first one where this worker has the turn to run one."""
        found = [number for number in numbers if self._suspects.get(number)]
        return sorted(found, key=lambda number: -self._suspects[number])

    def has_turn(self, partition: int) -> bool:
        return self._suspects.get(partition) == 2

    def part_of(self, room: LaneRoom, turn: Turn) -> LaneRoom:
        """The room of one turn. Where all places are taken, a partition's tenants share its part of
        them: it does not know the weights of others."""
        partition, fair = turn.line[0], room.fair
        if fair is not None:
            jobs = self._holding.jobs.values()
            own = {job.job.tenant for job in jobs if job.partition == partition}
            fair = replace(
                fair,
                max_jobs=round(fair.max_jobs * turn.share),
                max_tokens=int(fair.max_tokens * turn.share),
                held={tenant: held for tenant, held in fair.held.items() if tenant in own},
            )
        return replace(room, max_jobs=turn.max_jobs, fair=fair)

    def rooms(self) -> dict[str, LaneRoom]:
        """The room of each lane that has any."""
        self._checked_s = self._clock_s()
        return self._holding.rooms(self._terms, self._checked_s)

    async def claim_while_room(
        self, start: Callable[[list[Claimed]], Awaitable[None]], is_over: Callable[[], bool]
    ) -> dict[str, LaneRoom]:
        """Claims and starts jobs until nothing that waits fits. Returns the room of each lane that
        it has left to fill. Raises BrokerUnavailable, WireError, CommandDenied, and what `start`
        raises."""
        if len(parts := self._broker.parts()) > 1:
            turns = Turns(self, start)
            return await turns.claim_while_room(parts, is_over)
        [part] = parts
        await self.recover(part, start)
        while not is_over():
            rooms = self.rooms()
            if not rooms:
                break
            num_places = await self.claim(part, rooms, start)
            if num_places < max(1, *(room.max_jobs for room in rooms.values())):
                self.note_room()
                return rooms  # no other waiting job fits
        return {}

    async def recover(
        self, part: WorkerBroker, start: Callable[[list[Claimed]], Awaitable[None]]
    ) -> None:
        """Starts the jobs of a claim in a partition whose reply was lost, if one was."""
        if part.partition in self._lost_replies and self._holding.engine.ready is not None:
            jobs = self._holding.jobs.values()
            known = [job.job.id for job in jobs if job.partition == part.partition]
            await start(await part.mine(known))
            self._lost_replies.discard(part.partition)

    async def claim(
        self,
        part: WorkerBroker,
        rooms: dict[str, LaneRoom],
        start: Callable[[list[Claimed]], Awaitable[None]],
        note: Callable[[list[Claimed]], None] = lambda _: None,
        *,
        only_offers: bool = False,
    ) -> int:
        """Claims once in a partition and starts the jobs, after `note`. Returns the places that
        they fill."""
        holding, engine, started_s = self._holding, self._holding.engine, self._clock_s()
        assert engine.ready is not None, "without an engine there is no room"
        try:
            claimed = await part.claim(
                lanes={name: lane.min_share for name, lane in self._terms.items()},
                rooms=rooms,
                free_tokens=engine.load.num_free_blocks * engine.ready.block_size,
                is_idle=not holding.jobs,
                only_offers=only_offers,
                config_version=engine.options.batching_version,
            )
            note(claimed)
            await start(claimed)
        except BrokerUnavailable:
            self._lost_replies.add(part.partition)  # the call may have claimed jobs
            raise
        engine.steps.note_claim(self._clock_s() - started_s)
        return sum(job.job.num_places for job in claimed)

    def note_room(self) -> None:
        if self._holding.room(self._clock_s()) is not None:
            self._holding.engine.speed.note_room()


_LOOK_S = 0.5  # what waits in a partition is read again after this long


class Turns:
    """One round of claims in several partitions."""

    def __init__(self, claims: Claims, start: Callable[[list[Claimed]], Awaitable[None]]) -> None:
        self._claims = claims
        self._start = start
        self._missed: dict[Line, LaneRoom] = {}

    async def claim_while_room(
        self, parts: Sequence[WorkerBroker], is_over: Callable[[], bool]
    ) -> dict[str, LaneRoom]:
        claims = self._claims
        by_number = {part.partition: part for part in parts}
        due = [part for part in parts if claims.is_look_due(part.partition)]
        await asyncio.gather(*(self._look(part) for part in due))
        for number in claims.suspects(by_number):
            if (rooms := claims.rooms()) and not is_over():
                await self._claim(by_number[number], rooms)
            if claims.has_turn(number):
                return {}  # nothing else until this worker is idle
        while not is_over() and (rooms := claims.rooms()):
            shares = claims.shares
            turn = claims.rotation.choose(rooms, shares, self._missed)
            if turn is None:
                claims.note_room()
                for looked in due:  # other workers may offer jobs there
                    if rooms := claims.rooms():
                        await self._claim(looked, rooms, only_offers=True)
                return rooms
            part = by_number.get(turn.line[0])
            if part is None:
                claims.rotation.forget(turn.line[0])
                continue
            await self._take(turn, part, rooms[turn.line[1]])
        return {}

    async def _take(self, turn: Turn, part: WorkerBroker, room: LaneRoom) -> None:
        claims = self._claims
        rooms = {turn.line[1]: claims.part_of(room, turn)}

        def note(claimed: list[Claimed]) -> None:
            costs = {job.job.id: job.cost_tokens for job in claimed}
            claims.rotation.note_claimed(turn, costs, claims.shares)

        num_places = await self._claim(part, rooms, note)
        if num_places < max(1, turn.max_jobs):
            self._missed[turn.line] = replace(room, max_jobs=room.max_jobs - num_places)
            claims.look_again(part.partition)

    async def _claim(
        self,
        part: WorkerBroker,
        rooms: dict[str, LaneRoom],
        note: Callable[[list[Claimed]], None] = lambda _: None,
        *,
        only_offers: bool = False,
    ) -> int:
        """Returns the places filled: 0 also if the partition does not answer."""
        try:
            return await self._claims.claim(part, rooms, self._start, note, only_offers=only_offers)
        except BrokerUnavailable as exc:
            log.info("partition %d does not answer: %s", part.partition, exc)
            self._claims.rotation.forget(part.partition)
            self._claims.look_later(part.partition)
            return 0

    async def _look(self, part: WorkerBroker) -> None:
        """Reads what waits in a partition."""
        claims = self._claims
        try:
            await claims.recover(part, self._start)
            claims.note_look(part.partition, *await part.waiting(list(claims.shares)))
        except BrokerUnavailable:
            claims.rotation.forget(part.partition)
            claims.look_later(part.partition)
