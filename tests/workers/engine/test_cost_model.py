"""The cost model learns a step's duration, and the token budget derived from it meets its
target."""

import random

import pytest

from contract.jobs import SamplingParams
from tests.workers.engine.harness import Harness, Sizes, job
from workers.engine.cost_model import CostModel, chunk_features, step_features
from workers.engine.engine import Engine
from workers.engine.interface import Chunk, EngineLimits, Padding, Sample
from workers.engine.sequence import Sequence
from workers.engine.step_plan import StepReport
from workers.engine.strategy import ContinuousBatching
from workers.ipc.messages import Request
from workers.lanes import Lane

TRUE = (2e-3, 3e-5, 4e-8, 5e-9)


def chunk_of(start: int, num_tokens: int) -> Chunk:
    params = SamplingParams(max_tokens=1, seed=0)
    sequence = Sequence("job", 1, 0, "t", "lane", [0], 1, params)
    return Chunk(sequence, start, num_tokens, samples=False)


def true_s(chunks: list[Chunk]) -> float:
    return TRUE[0] + sum(t * x for t, x in zip(TRUE[1:], step_features(chunks), strict=True))


def random_step(draw: random.Random) -> list[Chunk]:
    streams = [chunk_of(draw.randrange(2000), 1) for _ in range(draw.randrange(1, 64))]
    prompts = [chunk_of(draw.randrange(4000), draw.randrange(2, 700)) for _ in range(2)]
    return streams + prompts[: draw.randrange(3)]


def learned(seed: int, num_steps: int = 100, noise: float = 0.0) -> CostModel:
    """A model that has seen random steps; the share by which their times vary."""
    draw, model = random.Random(seed), CostModel()
    for _ in range(num_steps):
        chunks = random_step(draw)
        model.observe(chunks, true_s(chunks) * draw.uniform(1 - noise, 1 + noise))
    return model


def test_known_coefficients_are_recovered_from_noisy_steps() -> None:
    """300 steps with 5% noise: each coefficient within a tenth."""
    assert learned(1, 300, noise=0.05).coefficients == pytest.approx(TRUE, rel=0.1)


def test_a_step_s_prediction_comes_from_the_steps_before_it() -> None:
    """Not from itself; the first 16 have none."""
    draw, model = random.Random(4), CostModel()
    steps = [random_step(draw) for _ in range(40)]
    found = [model.observe(chunks, true_s(chunks)) for chunks in steps]
    assert found[:16] == [0.0] * 16
    assert found[16:] == pytest.approx([true_s(chunks) for chunks in steps[16:]], rel=0.05)

    before_s = model.predict(step_features(steps[0]))
    assert model.observe(steps[0], 2 * before_s) == before_s


def test_one_slow_step_changes_little() -> None:
    """A step that took a thousand times its prediction counts as four times."""
    model = learned(2)

    model.observe([chunk_of(0, 100)], 5.0)

    sums = chunk_features(1000, 500)
    assert model.predict(sums) == pytest.approx(true_s([chunk_of(1000, 500)]), rel=0.2)


def test_prompts_that_explain_all_steps_do_not_stop_the_first_stream() -> None:
    """Prompts whose time grows faster than their length leave nothing for streams, so that a step
    of streams alone is predicted to take no time. Such steps are learned from like any others."""
    model = CostModel()
    for num_tokens in range(100, 200, 5):
        model.observe([chunk_of(0, num_tokens)], 1e-8 * num_tokens**3)
    streams = [chunk_of(5, 1)] * 32
    assert model.predict(step_features(streams)) == 0.0

    for _ in range(100):
        model.observe(streams, 0.01)

    assert model.predict(step_features(streams)) > 0.005


def test_the_largest_chunk_for_a_time_takes_just_that_time() -> None:
    """n tokens fit, n + 1 do not."""
    model = learned(3)

    for start, seconds in ((0, 1e-3), (3000, 5e-3), (100, 0.1)):
        num = model.max_tokens(seconds, start)
        assert model.predict_added(chunk_features(start, num)) <= seconds * 1.001
        assert model.predict_added(chunk_features(start, num + 1)) > seconds


def test_steps_that_no_clock_can_tell_teach_nothing() -> None:
    """A model that takes no time does not change the budget."""
    model = CostModel()
    for _ in range(100):
        model.observe([chunk_of(0, 10)], 0.0)

    assert not model.is_ready


class TimedModel:
    """Takes the time given by the true coefficients, on a simulated clock."""

    num_blocks, block_size, max_model_len = 4000, 16, 8192
    shares_blocks, num_state_slots, eos_token_ids = True, 0, frozenset[int]()

    def __init__(self) -> None:
        self.now_s = 0.0

    def run(
        self, chunks: list[Chunk], padding: list[Padding], masks: object = None
    ) -> list[Sample | None]:
        self.now_s += true_s(chunks)
        return [Sample(5) if chunk.samples else None for chunk in chunks]


class Server:
    """An engine with a lane that has a target, and `standard` without one; it has learned the
    times of steps."""

    def __init__(self, target_s: float = 0.02) -> None:
        self._model = TimedModel()
        self._engine = Engine(
            self._model,  # type: ignore[arg-type]
            EngineLimits(2048, 64, vocab_size=100),
            ContinuousBatching(),
            clock_s=lambda: self._model.now_s,
            lanes=[Lane("interactive", 0, itl_target_s=target_s), Lane("standard", 1)],
        )
        for i in range(12):
            self.add(f"warm-{i}", "standard", 1000 + 300 * i, 5)
        while self._engine.has_work:
            self._engine.step()

    def add(self, name: str, lane: str, num_prompt: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, seed=0)
        prompt_ids = tuple(random.Random(name).choices(range(100), k=num_prompt))
        request = Request(name, 1, "t", lane, (prompt_ids,), params, ((),), (False,))
        self._engine.add(request)

    def step(self) -> StepReport:
        return self._engine.step()

    def step_times_s(self, num_steps: int) -> list[float]:
        return [self.step().step_s for _ in range(num_steps)]

    def pass_time(self, seconds: float) -> None:
        self._model.now_s += seconds


def test_a_report_has_the_step_s_prediction() -> None:
    """For a prompt, beside streams, and for streams alone; 0 in an engine's first steps."""
    server = Server()
    server.add("prompt", "standard", 1500, 20)
    for _ in range(20):
        report = server.step()
        assert report.predicted_s == pytest.approx(report.step_s, rel=0.05)
    model = TimedModel()
    limits = EngineLimits(2048, 64, vocab_size=100)
    first = Engine(model, limits, ContinuousBatching(), clock_s=lambda: model.now_s)  # type: ignore[arg-type]
    assert first.step().predicted_s is None, "nothing was computed"
    params = SamplingParams(max_tokens=2, seed=0)
    first.add(Request("first", 1, "t", "standard", ((5, 6, 7),), params, ((),), (False,)))
    assert first.step().predicted_s == 0.0


def test_the_budget_meets_the_target_of_the_tightest_live_lane() -> None:
    """Prompts beside interactive streams: steps of 20 ms; without such streams 60 ms and more."""
    server = Server()
    for i in range(4):
        server.add(f"stream-{i}", "interactive", 20, 150)
    server.step()
    for i in range(10):
        server.add(f"prompt-{i}", "standard", 4000 + i, 2)
    times_s = server.step_times_s(100)
    assert max(times_s) <= 0.02 * 1.05
    assert sorted(times_s)[50] >= 0.02 * 0.9


def test_steps_stay_short_for_ten_seconds_after_a_lane_s_last_work() -> None:
    """The lane's next request would wait for the step's end."""
    server = Server()
    server.add("call", "interactive", 20, 2)
    server.step_times_s(2)
    for i in range(20):
        server.add(f"prompt-{i}", "standard", 4000 + i, 2)
    assert max(server.step_times_s(20)) <= 0.02 * 1.05
    server.pass_time(10.0)
    assert server.step().step_s > 0.05


def test_streams_without_a_target_wait_where_the_step_would_exceed_it() -> None:
    server = Server(target_s=0.005)
    for i in range(60):
        server.add(f"stream-{i}", "standard", 900, 200)
    while server.step().num_step_tokens > 60:
        pass  # prompts
    [free_s] = server.step_times_s(1)
    server.add("call", "interactive", 20, 200)
    server.step()
    assert free_s > 0.0055
    assert max(server.step_times_s(50)) <= 0.005 * 1.02


def test_a_prompt_of_a_lane_with_a_target_is_computed_at_once() -> None:
    """Where no stream with a target waits for the step, its length has no other limit."""
    server = Server()
    server.add("call", "interactive", 2000, 2)
    assert server.step().num_step_tokens == 2000


def test_a_prefill_share_leaves_the_rest_to_streams() -> None:
    """With a share of 0.2 of 20 tokens, a prompt gets four beside a stream and all alone."""
    harness = Harness(Sizes(max_num_batched_tokens=20, prefill_share=0.2))
    harness.add(job("alone", range(15), max_tokens=20, ignore_eos=True))
    first = harness.step().num_step_tokens
    harness.add(job("beside", range(50, 70)))

    assert first == 15
    assert [harness.step().num_step_tokens for _ in range(4)] == [5, 5, 5, 5]
