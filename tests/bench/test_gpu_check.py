"""The check of a GPU, as far as it runs without one."""

import dataclasses
import importlib.metadata
import os
import subprocess
import time
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from workers.ipc.messages import EngineOptions
from workers.model.ahead.runner import AheadRunner
from workers.model.attention.reference import ReferenceAttention
from workers.model.attention.rows import PreparedRows, RowsStep
from workers.model.gpu import drawing
from workers.model.gpu.graphs import sizes_up_to

pytest.importorskip("triton")

from bench.gpu_check import checks, wheels
from bench.gpu_check.__main__ import main
from bench.gpu_check.comparison import Transformers
from bench.gpu_check.decoding import check_graphs
from bench.gpu_check.machine import Machine
from bench.gpu_check.report import has_passed, report
from bench.gpu_check.results import Finding, Results
from bench.gpu_check.sanitizer import check_memory
from bench.gpu_check.served import Served
from bench.gpu_check.shapes import TINY_QWEN3
from bench.gpu_check.sizes import SMALL
from bench.gpu_check.stages import BUDGETS_S, read_figures, run_stages
from workers.model.attention.triton_attention import TritonAttention

TINY = Machine(torch.device("cpu"), is_tiny=True)
# transformers' continuous batching asks it for a CPU's memory; a GPU needs none.
ON_A_CPU = ("psutil",)


def needs_of(names: tuple[str, ...]) -> set[str]:
    """Top-level names of these distributions and of all that they need, without extras."""
    left, done, found = list(names), set[str](), set[str]()
    while left:
        name = left.pop()
        if name in done:
            continue
        done.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of CUDA, or of another Python
        found |= {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)
    return found


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """The interpreter of an environment that has only torch, Triton, transformers, what they need,
    and what is carried."""
    folder = tmp_path / "bare"
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    installed = Path(str(importlib.metadata.distribution("torch").locate_file("")))
    carried = [Requirement(text).name for text in wheels.carried()]
    for name in needs_of((*wheels.PRESENT, *carried, *ON_A_CPU)) - {"__pycache__"}:
        if (installed / name).exists():
            (packages / name).symlink_to(installed / name)
    return folder / "bin" / "python3"


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_the_whole_check_runs_where_only_wheels_can_be_carried(
    tmp_path: Path, bare_python: Path
) -> None:
    """On a CPU, with tiny shapes, by the script. Every figure is present and every check passes."""
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    environment["PATH"] = f"{bare_python.parent}:{environment['PATH']}"
    environment.pop("BATCHWAY_TORCH", None)
    out = tmp_path / "out"
    script = str(wheels.ROOT / "scripts" / "gpu-check")
    command = [script, "--device", "cpu", "--tiny", "--out", str(out)]

    ran = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert ran.returncode == 0, ran.stderr
    stages = dict(read_figures(out))
    assert list(stages) == list(BUDGETS_S)
    for figures in stages.values():
        assert (figures["skipped"], figures["failed"]) == ([], [])
    names = {check["name"].split(":")[0] for check in stages["kernels"]["checks"]}
    assert names == {"attention", "norm", "gate", "rotation and cache", "sampling"}
    decoding = stages["decoding"]
    for streams in map(str, SMALL.streams):
        assert decoding["decoding"][streams][0]["tokens_per_s"] > 0
        assert 0 <= decoding["host gap"][streams][0]["share"] < 1
        assert decoding["profile"][streams][0]["kernels"]
    assert list(stages["strategies"]["strategies"]) == ["continuous", "dynamic", "static"]
    [check] = stages["http"]["checks"]
    assert (check["name"], check["passed"]) == ("a killed worker", True)
    for streams in map(str, SMALL.streams):
        assert stages["http"]["http"][streams][0]["tokens_per_s"] > 0
    held = [check["name"] for check in stages["transformers"]["checks"] if check["passed"]]
    assert held == ["engine's tokens", "tokens around the kill"]
    assert stages["transformers"]["closed"]["transformers"][0] > 0
    assert stages["sanitizer"]["state"] == "no GPU"
    assert ran.stdout.strip() == (out / "report.md").read_text().strip()
    wanted = ("prefill", "host gap", "sampling", "continuous beside it", "transformers' continuous")
    assert all(word in ran.stdout for word in wanted)


def test_without_a_gpu_the_check_exits_with_its_own_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a script can distinguish it from a failure."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert main(["--out", str(tmp_path)]) == 2

    assert "no CUDA device" in capfd.readouterr().err


def test_a_wrong_kernel_fails_its_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check by its name. A kernel that raises fails its check, and not the others."""

    class Doubled(ReferenceAttention):
        def prepare(self, *args):  # type: ignore[no-untyped-def]
            prepared = super().prepare(*args)
            attend = prepared.attend
            prepared.attend = lambda *tensors: 2 * attend(*tensors)  # type: ignore[method-assign]
            return prepared

    def broken() -> Finding:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(checks, "ReferenceAttention", Doubled)
    results = Results(tmp_path / "kernels.json", lambda text: None, end_s=float("inf"))
    results.check("broken", broken)
    for name, check in checks.kernel_checks(TINY):
        results.check(name, check)

    [figures] = [found for _, found in read_figures(tmp_path)]
    failed = {check["name"].split(":")[0] for check in figures["checks"] if not check["passed"]}
    assert failed == {"attention", "broken"}
    assert len(figures["checks"]) > 4
    assert "shared memory" in figures["checks"][0]["detail"]


def test_what_does_not_fit_into_the_time_is_named(tmp_path: Path) -> None:
    """Nothing starts that took longer the last time than what is left; another may."""
    now_s = 0.0
    results = Results(
        tmp_path / "decoding.json", lambda text: None, end_s=10.0, clock_s=lambda: now_s
    )

    def slow() -> int:
        nonlocal now_s
        now_s += 6.0
        return 1

    results.measure("decoding", "256", slow)
    results.measure("decoding", "256", slow)
    results.measure("decoding", "1", lambda: 2)

    [figures] = [found for _, found in read_figures(tmp_path)]
    assert figures["decoding"] == {"256": [1], "1": [2]}
    assert figures["skipped"] == ["decoding: 256"]


def test_a_stage_whose_time_is_up_is_ended_and_named(tmp_path: Path) -> None:
    """The next stage runs, and earlier results are gone."""
    (tmp_path / "sanitizer.json").write_text("{}")
    ended = []

    has_gpu = run_stages(
        tmp_path,
        ["--device", "cpu", "--tiny"],
        os.environ,
        lambda: ended.append(dict(read_figures(tmp_path))),
        {"kernels": 0.0, "decoding": 0.0},
    )

    assert has_gpu
    assert [list(stages) for stages in ended] == [["kernels"], ["kernels", "decoding"]]
    assert all(f["skipped"] == ["the rest, after 0 s"] for f in ended[-1].values())


def test_transformers_failure_does_not_lose_the_report() -> None:
    """What could not be measured is named; only our own failures fail the check."""
    stages = figures_of_a_run()
    stages["transformers"]["failed"] = ["closed: transformers: MemoryError: no room"]

    page = report(stages)

    assert has_passed(stages)
    assert "MemoryError: no room" in page
    assert "| output tokens/s | 150 (140 to 160) |" in page
    assert "3.00 times" in page
    stages["decoding"]["failed"] = ["sampling: greedy: RuntimeError: lost"]
    assert not has_passed(stages)


def test_a_failed_check_fails_the_whole() -> None:
    stages = figures_of_a_run()
    stages["kernels"]["checks"] = [{"name": "norm", "passed": False, "detail": "off by 1"}]

    assert not has_passed(stages)
    assert "norm FAILED: off by 1" in report(stages)


def figures_of_a_run() -> dict[str, Any]:
    spread = {"p50": 0.1, "p99": 0.2, "p99.9": 0.2, "max": 0.2}

    def of(**figures: object) -> dict[str, Any]:
        return {"checks": [], "failed": [], "skipped": [], **figures}

    runs = [
        {
            "tokens_per_s": rate,
            "first_token_s": spread,
            "between_tokens_s": spread,
            "decoding": None,
        }
        for rate in (140.0, 160.0)
    ]
    strategies = {
        name: [{"tokens_per_s": rate, "num_steps": 5, "whole_s": spread}]
        for name, rate in (("continuous", 30.0), ("static", 10.0))
    }
    return {
        "kernels": of(roofs={"bytes_per_s": 4e12, "flops": 8e14}),
        "decoding": of(shape="Qwen3-8B", num_in=128, num_out=1024, decoding={"1": runs}),
        "strategies": of(shape="Llama-2-7B", strategies=strategies),
        "transformers": of(),
    }


def test_a_wrong_draw_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """And rows whose tables are on the device fail the check of their attention."""

    def wrong(*arguments: Any) -> torch.Tensor:
        return drawing.draw_by_triton(*arguments) + 1

    def beside(self: TritonAttention, step: RowsStep) -> PreparedRows:
        return PreparedRows(dataclasses.replace(step, rows=step.rows * 0, longest=600))

    monkeypatch.setattr(checks, "draw_by_triton", wrong)
    monkeypatch.setattr(TritonAttention, "prepare_rows", beside)

    found = {name: check() for name, check in checks.kernel_checks(TINY) if "mixed" not in name}

    failed = {name for name, finding in found.items() if not finding.passed}
    assert {name.split(":")[0] for name in failed} == {"sampling", "attention"}
    assert "in place of" in found["sampling: 60 tokens"].detail


@pytest.mark.parametrize("num_recorded", [None, 2, 12])
def test_a_model_without_all_its_graphs_fails_a_check(num_recorded: int | None) -> None:
    """The loader only logs what it leaves out."""
    graphs = None if num_recorded is None else SimpleNamespace(sizes=sizes_up_to(7)[:num_recorded])
    model = object.__new__(AheadRunner)
    model.decoder = SimpleNamespace(graphs=graphs)  # type: ignore[assignment]
    options = EngineOptions(model_path="", max_num_seqs=7)

    finding = check_graphs(Served(TINY_QWEN3, TINY, model, options, 0))

    assert finding.passed == (num_recorded == 12)


def test_the_tolerance_is_what_transformers_differs_from_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice that, in deviations of a row's logits; on a CPU in float32 it is next to nothing."""
    model = Transformers(TINY_QWEN3, TINY)
    prompt, output = [5, 6, 7, 8], [4, 9, 30]
    exact = model._logits(prompt, output)

    assert model._own_difference(prompt, output) < 1e-4
    blurred = exact.clone()
    blurred[2, 17] += 3 * exact[2].std()
    monkeypatch.setattr(model, "_logits", lambda *_: blurred)
    assert 2.0 < model._own_difference(prompt, output) < 4.0
    assert model.check([prompt], [[int(row.argmax()) for row in exact]]).passed


def test_transformers_gets_the_same_weights_and_prompts() -> None:
    """Its own tokens are the best by its own logits; others are not."""
    model = Transformers(TINY_QWEN3, TINY)
    prompt = [5, 6, 7, 8]

    assert model.tokens_per_s((2, 6, 3), seed=1) > 0
    model.close()

    assert not model.check([prompt], [[4, 4, 4]]).passed


@pytest.mark.parametrize(("status", "summary"), [(0, "0 errors"), (9, "3 errors")])
def test_compute_sanitizers_errors_fail_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, summary: str
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho '========= ERROR SUMMARY: {summary}'\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    end_s = time.monotonic() + 600
    results = Results(tmp_path / "sanitizer.json", lambda text: None, end_s)

    check_memory(results, has_gpu=True)

    assert [check["passed"] for check in results.figures["checks"]] == [status == 0] * 2
    assert all(summary in check["detail"] for check in results.figures["checks"])


def test_what_is_carried_is_unpacked_for_the_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel is an archive of what it installs. What this Python has stays as it is."""
    for name in ("lacking", "msgspec"):
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as wheel:
            program = zipfile.ZipInfo(f"{name}/program")
            program.external_attr = 0o755 << 16
            wheel.writestr(program, "")
    monkeypatch.setattr(wheels, "FOLDER", tmp_path)

    wheels.unpack(tmp_path / "site")

    assert os.access(tmp_path / "site" / "lacking" / "program", os.X_OK)
    assert not (tmp_path / "site" / "msgspec").exists()


def test_a_python_that_lacks_something_is_told_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest versions are the project's own."""
    assert wheels.lacking() == []

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.10.1+cu130")

    assert wheels.lacking() == [
        "torch 2.10.1+cu130, needed is 2.11",
        "transformers 2.10.1+cu130, needed is 5.17",
        "triton 2.10.1+cu130, needed is 3.6",
    ]
