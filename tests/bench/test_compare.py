"""`batchway compare`: strategies in turns, on the same requests, with the same tokens."""

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from contract.jobs import SamplingParams
from infra.cli import main
from infra.measure.compare import (
    Trial,
    compare,
    comparison_tables,
    count_different,
    report,
    summarise_trials,
)
from infra.measure.engine import EngineRun, Timeline
from infra.measure.plots import draw_comparison
from infra.measure.workloads import Workload, WorkloadRequest, log_uniform_workload
from tests.fakes import VOCAB_SIZE, HashModel, HashModelOptions, expected_output
from tests.tiny_models import save_tiny_model
from workers.engine.engine import Engine
from workers.engine.strategy import ContinuousBatching, DynamicBatching, StaticBatching, Strategy
from workers.engine_process.engine_setup import limits_of
from workers.ipc.messages import EngineOptions

STRATEGIES: dict[str, Strategy] = {
    "static": StaticBatching(4, 0.01),
    "dynamic": DynamicBatching(4, 0.001),
    "continuous": ContinuousBatching(),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def engine_of(strategy: Strategy) -> Engine:
    limits = limits_of(EngineOptions(model_path="hash", max_num_seqs=4), VOCAB_SIZE)
    return Engine(HashModel(HashModelOptions()), limits, strategy)


CANDIDATES = {name: partial(engine_of, strategy) for name, strategy in STRATEGIES.items()}


def trials(num_rounds: int = 2) -> tuple[Workload, list[Trial]]:
    workload = log_uniform_workload(12, 256, prompt_tokens=(3, 12), output_tokens=(2, 20), seed=4)
    done = compare(CANDIDATES, workload, 256, loads=[4.0], num_rounds=num_rounds, seed=1)
    return workload, done


def test_strategies_run_in_turns_and_yield_the_model_s_tokens() -> None:
    """Each round starts with another strategy; within a round all have the same rate. Every
    token is the oracle's."""
    workload, done = trials()

    assert [(t.number, t.load, t.candidate) for t in done] == [
        (number, load, name)
        for number, order in enumerate(
            (("static", "dynamic", "continuous"), ("dynamic", "continuous", "static"))
        )
        for load in (None, 4.0)
        for name in order
    ]
    best_per_s = max(len(workload.requests) / t.run.wall_s for t in done[:3])
    assert {t.rate_per_s for t in done if t.load} == {4 * best_per_s}
    for number in (0, 1):  # all have the same arrivals, which differ between rounds
        same = {_arrivals(trial) for trial in done if trial.load and trial.number == number}
        assert len(same) == 1
        assert all(arrival_s > 0 for arrival_s in same.pop())
    assert len({_arrivals(trial) for trial in done if trial.load}) == 2
    assert {_arrivals(trial) for trial in done if not trial.load} == {(0.0,) * 12}
    for trial in done:
        for timeline, request in zip(trial.run.timelines, workload.requests, strict=True):
            params = SamplingParams(
                max_tokens=request.max_tokens, seed=0, temperature=0.0, ignore_eos=True
            )
            assert timeline.token_ids == expected_output(request.prompt_token_ids, params)[0]
    assert summarise_trials(done)["is_alike"]


def _arrivals(trial: Trial) -> tuple[float, ...]:
    return tuple(timeline.arrival_s for timeline in trial.run.timelines)


def test_static_batches_take_more_steps_than_continuous_ones() -> None:
    """With known lengths the number of steps is exact, so no time is measured."""
    lengths = (2, 20, 2, 2, 20, 2, 2, 2)
    workload = Workload(tuple(WorkloadRequest((9, 9, i + 5), n) for i, n in enumerate(lengths)))

    done = compare(CANDIDATES, workload, 256, loads=[], num_rounds=1, seed=1)

    steps = {trial.candidate: trial.run.num_steps for trial in done}
    assert steps["static"] >= 40 > 25 > steps["continuous"]
    assert steps["static"] > steps["dynamic"] >= steps["continuous"]


def made_up(candidate: str, number: int, load: float | None, gap_s: float) -> Trial:
    """Two answers of two tokens. The first token and the second each take `gap_s`."""
    timelines = tuple(
        Timeline(arrival_s, [7, 8 + i], [arrival_s + gap_s, arrival_s + 2 * gap_s])
        for i, arrival_s in enumerate((0.0, 1.0))
    )
    run = EngineRun(4 * gap_s, timelines, 2, gap_s, 2**20)
    return Trial(candidate, number, load, None if load is None else 10 * load, run)


def made_up_trials() -> list[Trial]:
    gaps = {"a": (1.0, 3.0, 2.0), "b": (4.0, 4.0, 10.0)}
    return [
        made_up(name, number, load, gaps[name][number])
        for number in range(3)
        for load in (None, 0.5)
        for name in gaps
    ]


def test_medians_of_the_rounds_are_reported() -> None:
    """Of rates and of each percentile. Throughput and latency are in separate tables."""
    found = summarise_trials(made_up_trials())

    assert found["throughput"]["a"]["output_tokens_per_s"] == 4 / (4 * 2.0)
    assert found["throughput"]["b"]["wall_s"] == 16.0
    [at] = found["latency"]
    assert (at["load"], at["rate_per_s"]) == (0.5, 5.0)
    assert at["strategies"]["a"]["ttft_s"] == {"p50": 2.0, "p99": 2.0, "p99.9": 2.0}
    assert at["strategies"]["b"]["e2e_s"]["p99"] == 8.0
    rates, latency, verdict = comparison_tables(found).split("\n\n")
    assert "tokens/s" in rates
    assert "ms" not in rates
    assert "2,000 / 2,000 / 2,000" in latency
    assert "tokens/s" not in latency
    assert verdict == "all answers have the same tokens in all 3 rounds"


def test_different_answers_are_counted(tmp_path: Path) -> None:
    """One different token is enough, and the command exits with status 1."""
    done = made_up_trials()
    wrong = Timeline(0.0, [7, 99], [1.0, 2.0])
    run = done[-1].run
    done[-1] = replace(done[-1], run=replace(run, timelines=(wrong, run.timelines[1])))

    assert count_different(done) == {"a": 0, "b": 1}
    found = summarise_trials(done)
    assert not found["is_alike"]
    assert "differ from the first run's: b 1" in comparison_tables(found)
    options = argparse.Namespace(json=tmp_path / "out.json", png=None)
    assert report(found, options) == 1
    assert json.loads(options.json.read_text())["unlike_answers"] == {"a": 0, "b": 1}


def test_a_chart_is_drawn(tmp_path: Path) -> None:
    for done in (made_up_trials(), [t for t in made_up_trials() if t.load is None]):
        draw_comparison(summarise_trials(done), tmp_path / "out.png")
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_compares_strategies_and_files(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three strategies and a batching.yaml on a real model: same tokens, all figures, exit
    status 0."""
    config = tmp_path / "eager.yaml"
    config.write_text("strategy: {name: dynamic, batch_size: 2, window_s: 0.001}\n")
    small = ("--requests=6", "--prompt-tokens=3:9", "--output-tokens=2:6", "--max-running=3")
    outputs = (f"--json={tmp_path / 'out.json'}", f"--png={tmp_path / 'out.png'}")
    ways = (f"--model={model}", f"--config={config}", "--kv-cache-gib=0.01", "--threads=1")

    status = main(["compare", *small, *outputs, *ways, "--load", "2", "--rounds=2"])

    assert status == 0
    found = json.loads((tmp_path / "out.json").read_text())
    names = ["static, padded", "dynamic, padded", "continuous", "eager"]
    assert list(found["throughput"]) == names
    assert found["is_alike"]
    assert found["unlike_answers"] == dict.fromkeys(names, 0)
    assert len(found["throughput"]["eager"]["rounds_output_tokens_per_s"]) == 2
    assert found["num_requests"] == 6
    assert "all answers have the same tokens in all 2 rounds" in capsys.readouterr().out


def test_a_file_with_a_wrong_key_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text("strateg: static\n")
    assert main(["compare", f"--model={model}", f"--config={config}"]) == 1
    assert "strateg" in capsys.readouterr().err
