"""What a batch adds to first tokens of other lanes, on a simulated clock."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from contract.jobs import SamplingParams
from infra.tables import percentile
from tests.workers.engine.test_cost_model import TRUE, TimedModel
from workers.engine.engine import Engine
from workers.engine.interface import EngineLimits
from workers.engine.strategy import ContinuousBatching
from workers.ipc.messages import Request
from workers.lanes import DEFAULT_LANES, Lane

_NUM_LINES = 100  # of a batch, that wait or run


def lanes_with(max_slowdown: float | None) -> list[Lane]:
    return [*DEFAULT_LANES[:2], Lane("batch", priority=2, max_slowdown=max_slowdown)]


@dataclass
class Calls:
    times_s: list[float]  # to first tokens
    batch_tokens_per_s: float

    def quantile_s(self, share: float) -> float:
        return percentile(self.times_s, share) or 0.0


class Server:
    """An engine that has learned the times of steps; with a batch that never ends."""

    def __init__(self, lanes: Sequence[Lane], *, has_batch: bool) -> None:
        self.model = TimedModel()
        self.engine = Engine(
            self.model,  # type: ignore[arg-type]
            EngineLimits(2048, 64, vocab_size=100),
            ContinuousBatching(),
            clock_s=lambda: self.model.now_s,
            lanes=lanes,
        )
        self._draw, self._numbers = random.Random(0), iter(range(10**9))
        self.num_tokens: Counter[str] = Counter()  # by tenant
        self._has_batch = False
        for _ in range(20):
            self.add("batch", self._draw.randrange(100, 3000), 5)
        while self.engine.has_work:
            self.step()
        self.model.now_s += 100.0
        self._has_batch = has_batch

    def add(self, lane: str, num_prompt: int, num_output: int, tenant: str = "t") -> str:
        name = f"{tenant} {next(self._numbers)}"
        params = SamplingParams(max_tokens=num_output, seed=0)
        prompt = tuple(self._draw.choices(range(100), k=num_prompt))
        self.engine.add(Request(name, 1, tenant, lane, (prompt,), params, ((),), (False,)))
        return name

    def step(self) -> set[str]:
        """Runs a step. Returns the jobs that got tokens."""
        if self._has_batch:
            lines = sum(sequence.tenant == "lines" for sequence in self.engine.sequences)
            for _ in range(lines, _NUM_LINES):
                self.add("batch", 64, 32, "lines")
        names = {out.job_id for out in self.engine.step().outputs}
        self.num_tokens += Counter([name.partition(" ")[0] for name in names])
        return names

    def step_times_s(self, num_steps: int) -> list[float]:
        times_s = []
        for _ in range(num_steps):
            start_s = self.model.now_s
            self.step()
            times_s.append(self.model.now_s - start_s)
        return times_s

    def calls(self, lane: str, rate_per_s: float, lengths: Iterator[int]) -> Calls:
        """Calls come at random times, also during steps."""
        draw, start_s = random.Random(1), self.model.now_s
        waiting = [(start_s, length) for length in lengths]
        for i in range(1, len(waiting)):
            waiting[i] = waiting[i - 1][0] + draw.expovariate(rate_per_s), waiting[i][1]
        came_s: dict[str, float] = {}
        times_s: list[float] = []
        num_before = self.num_tokens["lines"]
        while waiting or came_s:
            if not self.engine.has_work and not self._has_batch:
                self.model.now_s = max(self.model.now_s, waiting[0][0])
            while waiting and waiting[0][0] <= self.model.now_s:
                at_s, length = waiting.pop(0)
                came_s[self.add(lane, length, 16)] = at_s
            names = self.step()
            times_s += [self.model.now_s - came_s.pop(name) for name in names & came_s.keys()]
        num_tokens = self.num_tokens["lines"] - num_before
        return Calls(times_s, num_tokens / (self.model.now_s - start_s))


@pytest.mark.parametrize(
    ("lane", "lengths"),
    [("interactive", (64,)), ("standard", (64,)), ("interactive", (32, 3000))],
    ids=["interactive", "standard", "mixed"],
)
def test_a_batch_delays_first_tokens_by_what_its_lane_allows(
    lane: str, lengths: tuple[int, ...]
) -> None:
    """They take at most 1.3 times as long as alone after a step of its own, which they may meet.
    Without a limit short ones take several times as long."""
    drawn = random.Random(2).choices(lengths, k=200)
    alone, beside, unlimited = (
        Server(lanes_with(most), has_batch=has_batch).calls(lane, 5.0, iter(drawn))
        for most, has_batch in ((1.3, False), (1.3, True), (None, True))
    )
    for share in (0.5, 0.9, 0.99):
        assert beside.quantile_s(share) <= 1.3 * (alone.quantile_s(share) + TRUE[0])
    if lengths == (64,):
        assert unlimited.quantile_s(0.9) > 3 * beside.quantile_s(0.9)
    assert beside.batch_tokens_per_s > 0.3 * unlimited.batch_tokens_per_s


def test_a_batch_has_whole_steps_ten_seconds_after_the_last_call() -> None:
    server = Server(lanes_with(1.3), has_batch=True)
    idle_s = server.step_times_s(20)
    server.calls("standard", 5.0, iter([64] * 20))
    limited_s = server.step_times_s(20)
    assert server.engine.step().gives_way
    server.model.now_s += 10.0
    again_s = server.step_times_s(20)
    assert max(limited_s) < 0.5 * max(idle_s)
    assert max(again_s) > 0.9 * max(idle_s)
    assert not server.engine.step().gives_way


@pytest.mark.parametrize("most", [1.3, 5.0])
def test_tenants_of_a_limited_lane_share_its_time(most: float) -> None:
    """By their service, however many streams each has; a call has a token in each step."""
    server = Server(lanes_with(most), has_batch=False)
    server.add("interactive", 64, 6000, "caller")
    for number in range(40):
        server.add("batch", 64, 6000, "many" if number else "one")
    while len(server.num_tokens) < 3:
        server.step()
    server.num_tokens.clear()
    server.step_times_s(1000)
    assert server.num_tokens["caller"] == 1000
    num_lines = server.num_tokens["one"] + server.num_tokens["many"]
    assert server.num_tokens["one"] >= 0.4 * min(2000, num_lines)


def test_a_limited_lane_gets_a_token_in_each_step() -> None:
    """Where its time is less than that takes."""
    server = Server(lanes_with(1.000001), has_batch=False)
    server.add("interactive", 64, 6000, "caller")
    server.add("batch", 20, 6000, "lines")
    server.step_times_s(200)
    assert server.num_tokens["caller"] == 200
    assert 180 <= server.num_tokens["lines"] <= 182
