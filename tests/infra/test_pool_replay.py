"""A trace replayed against the pool's policy: its cost, and the waits."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.pool import PoolPolicy
from infra.pool_replay import Outcome, WorkerModel, main, replay
from infra.traces import Arrival, read_trace, with_gap

MODEL = WorkerModel(
    tokens_per_s=100.0, stream_tokens_per_s=10.0, prompt_token_cost=0.0, linger_s=0.0
)
POLICY = PoolPolicy(
    wait_targets_s={"interactive": 5.0}, max_workers=4, cold_start_s=60.0, scale_in_after_s=30.0
)
# Two requests a second for two minutes, each 5 s of one stream: the full load of one worker.
STEADY = [Arrival(number / 2, 10, 50) for number in range(240)]


def play(arrivals: list[Arrival], num_at_start: int, policy: PoolPolicy = POLICY) -> Outcome:
    return replay("", arrivals, policy, MODEL, target_s=5.0, num_at_start=num_at_start)


def fixed(num: int) -> PoolPolicy:
    return PoolPolicy(wait_targets_s={"interactive": 5.0}, min_workers=num, max_workers=num)


def test_fixed_pools_cost_workers_times_duration() -> None:
    """With enough workers no request waits."""
    two, three = play(STEADY, 2, fixed(2)), play(STEADY, 3, fixed(3))
    assert two.num_missed == three.num_missed == 0
    assert two.num_requests == 240
    assert two.gpu_hours == pytest.approx(2 * 124.5 / 3600, abs=0.001)
    assert three.gpu_hours == pytest.approx(1.5 * two.gpu_hours)


def test_from_zero_the_first_requests_wait_for_the_cold_start() -> None:
    """With a warm pool none does."""
    cold, warm = play(STEADY, 0), play(STEADY, 2)
    assert cold.num_missed >= 110
    assert 55 <= cold.p99_wait_s <= 61
    assert warm.num_missed == 0


def test_an_idle_hour_costs_almost_nothing() -> None:
    """Only the time until the pool is empty."""
    once, twice = play(STEADY, 2), play(with_gap(STEADY, 3600.0), 2)
    assert twice.gpu_hours < 2 * once.gpu_hours + 0.15
    assert twice.gpu_hours < play(with_gap(STEADY, 3600.0), 1, fixed(1)).gpu_hours


def test_a_machine_is_paid_for_while_it_lingers() -> None:
    """Each of two workers that end before the gap, and none of a fixed pool."""
    model = replace(MODEL, linger_s=360.0)
    arrivals = with_gap(STEADY, 3600.0)
    without = play(arrivals, 2)
    found = replay("", arrivals, POLICY, model, target_s=5.0, num_at_start=2)
    assert found.gpu_hours - without.gpu_hours >= 0.2
    fixed_pool = replay("", STEADY, fixed(2), model, target_s=5.0, num_at_start=2)
    assert fixed_pool.gpu_hours == play(STEADY, 2, fixed(2)).gpu_hours


def test_published_traces_are_read(tmp_path: Path) -> None:
    """Dates with seven digits of a second, or seconds. Requests are sorted and start at 0 s."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "T,C,G\n2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.6805900,374,44\n"
    )
    first, second = read_trace(path)
    assert first == Arrival(0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579)
    path.write_text("T,C,G\n1.5,1,2\n2,x,2\n")
    with pytest.raises(ValueError, match=r"trace\.csv: row 3"):
        read_trace(path)


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each setting, and for each fixed pool."""
    path = tmp_path / "trace.csv"
    rows = "".join(f"{one.at_s},{one.prompt_tokens},{one.output_tokens}\n" for one in STEADY[:20])
    path.write_text("t,c,g\n" + rows)
    assert main([f"--trace={path}", "--max-workers=2", "--cold-start-s=10", "--gap-s=60"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[-2:]] == ["fixed 1", "fixed 2"]
    assert len(lines) == 2 + 7 + 2
