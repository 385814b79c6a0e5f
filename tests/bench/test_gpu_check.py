"""The check of a GPU, as far as it runs without one."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workers.model.attention.reference import ReferenceAttention

pytest.importorskip("triton")

from bench.gpu_check import checks
from bench.gpu_check.__main__ import main
from bench.gpu_check.machine import Machine
from bench.gpu_check.plan import SMALL, GpuCheck

TINY = Machine(torch.device("cpu"), is_tiny=True)


@pytest.mark.campaign
@pytest.mark.timeout(400)
def test_the_whole_check_runs_on_a_cpu(tmp_path: Path) -> None:
    """On tiny shapes, with replacements for CUDA graphs. Every figure is present and every check
    passes."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "bench.gpu_check", "--device", "cpu", "--tiny"]

    ran = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True)

    assert ran.returncode == 0, ran.stderr
    report = json.loads(out.read_text())
    assert report["passed"]
    assert report["skipped"] == []
    names = {check["name"].split(":")[0] for check in report["checks"]}
    assert {"attention", "norm", "gate", "engine", "rotation of queries"} <= names
    for shape in SMALL.shapes:
        streams = [row["num_streams"] for row in report["decoding"][shape.name]]
        assert streams == list(SMALL.streams)
        assert all(row["tokens_per_s"] > 0 for row in report["decoding"][shape.name])
        assert report["prefill"][shape.name]["tokens_per_s"] > 0
    [closed] = report["closed"].values()
    assert closed["ours"] > 0
    assert closed["transformers"] > 0, closed["reason"]
    [loads] = report["loaded"].values()
    assert [load["strategy"] for load in loads] == ["static", "dynamic", "continuous"]
    table = ran.stdout
    assert all(word in table for word in ("prefill", "host gap", "ratio", "p99", "copy"))


def test_without_a_gpu_the_check_exits_with_its_own_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a script can distinguish it from a failure."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert main([]) == 2

    assert "no CUDA device" in capsys.readouterr().err


def test_a_wrong_kernel_fails_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check by its name. A kernel that raises fails its check."""

    class Doubled(ReferenceAttention):
        def prepare(self, *args):  # type: ignore[no-untyped-def]
            prepared = super().prepare(*args)
            attend = prepared.attend
            prepared.attend = lambda *tensors: 2 * attend(*tensors)  # type: ignore[method-assign]
            return prepared

    monkeypatch.setattr(checks, "ReferenceAttention", Doubled)
    failed = {check.name.split(":")[0] for check in checks.check_kernels(TINY) if not check.passed}
    assert failed == {"attention"}

    def broken() -> list[checks.Check]:
        raise RuntimeError("out of resource: shared memory")

    [check] = checks.run_check("norm", broken)
    assert not check.passed
    assert "shared memory" in check.detail


def test_skipped_measurements_are_named() -> None:
    """No measurement starts after the time limit."""
    clock = itertools.count(0.0, 10_000.0)

    report = GpuCheck(TINY, SMALL, lambda text: None, lambda: next(clock)).run()

    wanted = [*(shape.name for shape in SMALL.shapes), "transformers' continuous batching"]
    assert report.skipped == [f"{what}: the time limit was reached" for what in wanted]
    assert report.checks
    assert report.decoding == {}
