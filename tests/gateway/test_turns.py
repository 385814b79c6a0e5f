"""Turns of work before the queue, on a clock that only the tests move."""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from gateway.turns import (
    LEAST_WAITING_BYTES,
    MAX_WAITING_BYTES,
    Busy,
    Owner,
    Turns,
    hold,
    work_for,
)

pytestmark = pytest.mark.anyio

ANN, BOB = Owner("ann"), Owner("bob")
ANNS_BATCH = Owner("ann", is_attended=False)


@dataclass
class Workshop:
    """Work that ends when the test says so."""

    num_places: int = 2
    now_s: float = 0.0
    running: list[tuple[Owner, asyncio.Event]] = field(default_factory=list)
    order: list[Owner] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns = Turns(self.num_places, clock=lambda: self.now_s)

    async def _work(self, owner: Owner) -> None:
        async with self.turns.turn(owner):
            done = asyncio.Event()
            self.running.append((owner, done))
            self.order.append(owner)
            await done.wait()

    async def end_all(self) -> None:
        while self.running:
            await self.end()

    async def begin(self, owner: Owner, times: int = 1) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self._work(owner)) for _ in range(times)]
        await settled()
        return tasks

    async def end(self, number: int = 0, took_s: float = 1.0) -> Owner:
        """Ends the work that has run for longest, or the one of this number."""
        self.now_s += took_s
        owner, done = self.running.pop(number)
        done.set()
        await settled()
        return owner


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def gone(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_anothers_work_begins_beside_any_amount_of_ones_own() -> None:
    work = Workshop(num_places=4)
    tasks = await work.begin(ANN, 100)
    assert work.order == [ANN, ANN]  # half of the places
    tasks += await work.begin(BOB)
    assert work.order[-1] == BOB
    await work.end_all()
    await asyncio.gather(*tasks)
    assert len(work.order) == 101


async def test_the_last_place_is_for_an_owner_that_has_none() -> None:
    """However many others have much work; a batch, which has no caller, does not take it."""
    work = Workshop(num_places=4)
    tasks = await work.begin(ANN, 9) + await work.begin(BOB, 9) + await work.begin(ANNS_BATCH, 9)
    assert work.order == [ANN, ANN, BOB]
    for number in range(5):
        tasks += await work.begin(Owner(f"{number}"))
        assert work.order[-1] == Owner(f"{number}")
        await work.end(-1)
    await gone(tasks)


@pytest.mark.parametrize("seed", range(10))
async def test_owners_get_equal_times_however_long_their_work_is(seed: int) -> None:
    """And by their weights."""
    chance = random.Random(seed)
    heavy = Owner("heavy", weight=chance.choice([1.0, 2.0, 4.0]))
    work = Workshop(num_places=1)
    tasks = await work.begin(heavy, 60) + await work.begin(BOB, 250)
    times = {heavy: 0.0, BOB: 0.0}
    for _ in range(60):
        took_s = 4.0 if work.running[0][0] == heavy else 1.0
        times[await work.end(took_s=took_s)] += took_s
    assert times[heavy] / heavy.weight == pytest.approx(times[BOB], abs=8.0)
    await gone(tasks)


async def test_a_batch_takes_one_place_and_an_eighth_of_the_time() -> None:
    work = Workshop(num_places=4)
    tasks = await work.begin(ANNS_BATCH, 50)
    assert work.order == [ANNS_BATCH]
    tasks += await work.begin(ANN, 50) + await work.begin(BOB, 50)
    for _ in range(40):
        await work.end()
    assert work.order.count(ANNS_BATCH) <= 8
    await gone(tasks)


async def test_a_new_owner_has_no_time_saved_up() -> None:
    """Who comes late has no more turns than those who were there before."""
    work = Workshop(num_places=1)
    tasks = await work.begin(ANN, 50)
    for _ in range(20):
        await work.end()
    tasks += await work.begin(BOB, 50)
    for _ in range(20):
        await work.end()
    assert abs(work.order[20:].count(ANN) - work.order[20:].count(BOB)) <= 2
    await gone(tasks)


async def test_whoever_leaves_the_line_is_passed_over() -> None:
    work = Workshop(num_places=1)
    [first, leaving, last] = await work.begin(ANN, 3)
    leaving.cancel()
    await settled()
    await work.end()
    assert len(work.order) == 2
    assert await work.end() == ANN
    await asyncio.gather(first, last)


@pytest.mark.parametrize("num_gone", [1, 2])
async def test_an_owner_that_leaves_as_its_turn_comes_takes_none(num_gone: int) -> None:
    """The place goes to the next one, or stays free."""
    work = Workshop(num_places=1)
    first, *waiting = await work.begin(ANN, 3)
    work.running.pop()[1].set()
    await asyncio.sleep(0)  # `first` ends in the next round of the loop
    for task in waiting[:num_gone]:
        task.cancel()
    await settled()
    await first
    waiting += await work.begin(BOB)
    await work.end_all()
    assert work.order[-1] == BOB
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [isinstance(each, asyncio.CancelledError) for each in results].count(True) == num_gone


async def test_a_turn_that_comes_as_its_owner_leaves_goes_to_the_next() -> None:
    work = Workshop(num_places=1)
    [first, leaving, last] = await work.begin(ANN, 3)
    work.running.pop()[1].set()
    await first
    leaving.cancel()
    await settled()
    with suppress(asyncio.CancelledError):
        await leaving
    await work.end_all()
    await last


async def test_a_wait_ends_at_the_deadline_of_its_call() -> None:
    """All its waits together; without a deadline, as in batches, it goes on."""
    work = Workshop(num_places=1)
    [first, patient] = await work.begin(ANN, 2)
    work_for(ANN, wait_s=0.0)
    for _ in range(2):
        with pytest.raises(Busy) as refused:
            await work._work(ANN)
        assert refused.value.retry_after_s == 1.0
    await work.end_all()
    await asyncio.gather(first, patient)
    await asyncio.gather(*(await work.begin(ANN)), work.end_all())


async def test_what_waits_is_limited_by_what_it_holds() -> None:
    """For its own owner, with a time to retry that grows with the line."""
    work = Workshop(num_places=2)
    running = await work.begin(ANN)
    for _ in range(8):
        running += await work.begin(ANN)
        await work.end(took_s=3.0)
    most = MAX_WAITING_BYTES // 2 // LEAST_WAITING_BYTES
    running += await work.begin(ANN, most)
    with pytest.raises(Busy) as refused:
        await work._work(ANN)
    assert refused.value.retry_after_s > most
    await gone(running)


@pytest.mark.parametrize("seed", range(10))
async def test_waiting_work_never_holds_more_than_its_memory(seed: int) -> None:
    """Whoever comes and leaves: an owner has at most what is free, so that others find some; and
    all of it is free again in the end."""
    chance = random.Random(seed)
    work, tasks, held = Workshop(num_places=1), list[asyncio.Task[None]](), dict[str, list[int]]()
    refusals = 0

    async def come(owner: Owner, num_bytes: int) -> None:
        hold(num_bytes)
        mine = held.setdefault(owner.tenant, [])
        mine.append(max(num_bytes, LEAST_WAITING_BYTES))
        try:
            await work._work(owner)
        finally:
            mine.remove(max(num_bytes, LEAST_WAITING_BYTES))

    tasks += await work.begin(BOB)
    for _ in range(600):
        owner, num_bytes = Owner(chance.choice("abc")), chance.choice([100, 2**16, 2**18, 2**20])
        tasks.append(asyncio.create_task(come(owner, num_bytes)))
        await settled()
        waiting = {tenant: sum(sizes) for tenant, sizes in held.items()}
        assert sum(waiting.values()) <= MAX_WAITING_BYTES
        assert max(waiting.values()) <= MAX_WAITING_BYTES // 2
        if tasks[-1].done():
            assert isinstance(tasks[-1].exception(), Busy)
            refusals += 1
            free = MAX_WAITING_BYTES - sum(waiting.values())
            assert waiting[owner.tenant] + num_bytes > free
        if chance.random() < 0.1:
            tasks[chance.randrange(1, len(tasks))].cancel()
            await settled()
    assert refusals
    await gone(tasks)
    assert work.turns._num_free_bytes == MAX_WAITING_BYTES
