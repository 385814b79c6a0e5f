"""`batchway bench engine`: its input, its figures, and that its tokens are the model's."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.jobs import SamplingParams
from infra.cli import main
from infra.measure.engine import Timeline, run_workload
from infra.measure.workloads import (
    BadWorkload,
    Workload,
    WorkloadRequest,
    log_uniform_workload,
    read_workload,
)
from infra.tables import percentile
from tests.fakes import VOCAB_SIZE as HASH_VOCAB_SIZE
from tests.fakes import HashModel, expected_output
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from workers.engine.engine import Engine
from workers.engine.strategy import ContinuousBatching
from workers.engine_process.engine_setup import limits_of
from workers.ipc.messages import EngineOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def save(workload: Workload, folder: Path) -> Path:
    file = folder / "workload.json"
    file.write_bytes(msgspec.json.encode(workload))
    return file


def run(*arguments: object) -> int:
    return main(["bench", "engine", *map(str, arguments)])


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("strategy", ["continuous", "static", "dynamic"])
@pytest.mark.each_value
def test_all_strategies_yield_equal_tokens_and_all_figures(
    model: Path, tmp_path: Path, strategy: str, quantization: str
) -> None:
    """The tokens of each request are those of torch alone."""
    workload = log_uniform_workload(
        6, VOCAB_SIZE, prompt_tokens=(3, 40), output_tokens=(2, 12), seed=1
    )
    options = ["--model", model, "--workload", save(workload, tmp_path), "--dtype", "float32"]
    options += ["--quantization", quantization]
    out, plain = tmp_path / "out.json", tmp_path / "plain.json"

    assert run(*options, "--max-running", 4, "--strategy", strategy, "--json", out) == 0
    assert run(*options, "--torch-only", "--json", plain) == 0

    found: dict[str, Any] = json.loads(out.read_text())
    assert found["outputs"] == json.loads(plain.read_text())["outputs"]
    assert list(map(len, found["outputs"])) == [r.max_tokens for r in workload.requests]
    assert found["output_tokens_per_s"] * found["wall_s"] == pytest.approx(
        workload.num_output_tokens
    )
    for latency in ("ttft_s", "itl_s", "e2e_s"):
        spread = found[latency]
        assert 0 < spread["p50"] <= spread["p99"] <= spread["max"] <= found["wall_s"]
    assert found["peak_rss_bytes"] > 2**20


def test_no_request_starts_before_its_arrival() -> None:
    now_s = 0.0

    def clock_s() -> float:
        nonlocal now_s
        now_s += 0.001
        return now_s

    def sleep(rest_s: float) -> None:
        nonlocal now_s
        now_s += rest_s

    limits = limits_of(EngineOptions(model_path="hash"), HASH_VOCAB_SIZE)
    engine = Engine(HashModel(), limits, ContinuousBatching(), clock_s=clock_s)
    workload = Workload(
        (WorkloadRequest((5, 6, 7), 4, arrival_s=0.02), WorkloadRequest((8, 9), 4, arrival_s=0.0))
    )

    done = run_workload(engine, workload, clock_s=clock_s, sleep=sleep)

    late, early = done.timelines
    assert early.times_s[0] < 0.02 <= late.times_s[0]
    params = SamplingParams(max_tokens=4, seed=0, temperature=0.0, ignore_eos=True)
    assert late.token_ids == expected_output((5, 6, 7), params)[0]
    assert late.ttft_s > 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("not json", "is no workload"),
        ('{"requests": []}', "has no requests"),
        ('{"requests": [{"prompt_token_ids": [], "max_tokens": 3}]}', r"requests\[0\]"),
        ('{"requests": [{"prompt_token_ids": [4], "max_tokens": 0}]}', r"requests\[0\]"),
        ('{"requests": [{"prompt_token_ids": [4], "max_tokens": 3, "n": 2}]}', "unknown field"),
    ],
)
def test_errors_name_the_wrong_field_of_a_workload(
    content: str, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "workload.json"
    file.write_text(content)

    with pytest.raises(BadWorkload, match=reason):
        read_workload(file)


@pytest.mark.parametrize("command", ["bench engine", "compare"])
def test_a_command_that_cannot_run_ends_with_one_sentence(
    command: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a missing file, a token beyond the vocabulary, and a missing model."""
    beyond = save(Workload((WorkloadRequest((VOCAB_SIZE,), 2),)), tmp_path)
    words = command.split()

    assert main([*words, f"--model={model}", f"--workload={tmp_path / 'none.json'}"]) == 1
    assert main([*words, f"--model={model}", f"--workload={beyond}"]) == 1
    assert main([*words, f"--model={tmp_path / 'nowhere'}", f"--workload={beyond}"]) == 1

    messages = [line for line in capsys.readouterr().err.splitlines() if f"{command}:" in line]
    assert len(messages) == 3
    assert "none.json cannot be read" in messages[0]
    assert "vocabulary" in messages[1]


def test_percentiles_are_measured_values() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert percentile([float(i) for i in range(1, 101)], 0.99) == 99.0


def test_latencies_of_a_timeline() -> None:
    timeline = Timeline(1.0, [7, 8, 9], [1.5, 1.75, 2.5])

    assert (timeline.ttft_s, timeline.itls_s, timeline.e2e_s) == (0.5, [0.25, 0.75], 1.5)
