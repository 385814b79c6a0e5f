"""The check of a GPU, as far as it runs without one."""

import importlib.metadata
import json
import os
import select
import subprocess
import sys
import time
import venv
import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from bench import processes
from bench.gpu_check import calls, wheels
from bench.gpu_check.__main__ import main
from bench.gpu_check.machine import output_tokens, shape_for
from bench.gpu_check.record import Finding, NotAvailable, Record
from bench.models import SHAPES, TINY, random_decoder, save_model
from bench.processes import UP_IS_READY, NotStarted, run_program, running_server
from infra.measure.workloads import log_uniform_workload
from tests.infra.processes import is_alive

CPU = torch.device("cpu")


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
    """The interpreter of an environment that has only torch, transformers, what they need, and what
    is carried."""
    folder = tmp_path / "bare"
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    installed = Path(str(importlib.metadata.distribution("torch").locate_file("")))
    carried = [Requirement(text).name for text in wheels.carried()]
    for name in needs_of((*wheels.PRESENT, *carried)) - {"__pycache__"}:
        if (installed / name).exists():
            (packages / name).symlink_to(installed / name)
    return folder / "bin" / "python3"


def check(bare_python: Path, out: Path, *options: str) -> dict[str, Any]:
    """Runs the script, whose status must be 0; returns what it has written."""
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    environment["PATH"] = f"{bare_python.parent}:{environment['PATH']}"
    environment.pop("BATCHWAY_TORCH", None)
    command = [str(wheels.ROOT / "scripts" / "gpu-check"), *options, "--out", str(out)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert ran.stdout.strip() == (out / "gpu-check.md").read_text().strip()
    found: dict[str, Any] = json.loads((out / "gpu-check.json").read_text())
    return found


def assert_measured(stages: dict[str, Any]) -> None:
    """Both servers in turn with each number of streams, and what one of them went through."""
    streams = {"1", "4", "8"}
    assert stages["beside"]["shares"].keys() == streams
    for name in ("batchway, vLLM", "vllm serve"):
        loads, schema = stages[name]["loads"], stages[f"{name}, a schema"]["loads"]
        assert loads.keys() == streams
        assert all(load["tokens_per_s"] > 0 for load in [*loads.values(), *schema.values()])
        assert "4 of 4 outputs ended, 0 of them no JSON" in str(stages[name]["checks"])
    killed = stages["killed worker, vLLM"]
    assert killed["same"] == killed["whole"] == killed["streams"] == 4


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_rehearsal_runs_every_stage(tmp_path: Path, bare_python: Path) -> None:
    """By the script, where only wheels can be carried, on a CPU with tiny shapes and a stand-in for
    vLLM. What the stand-in refuses is no failure."""
    stages = check(bare_python, tmp_path / "out", "--rehearse")

    assert_measured(stages)
    done = {name for name, found in stages.items() if found.get("state") == "done"}
    assert done == {
        *("machine", "starts", "streams", "structured output", "vectors", "killed worker, vLLM")
    }
    assert stages["embeddings"]["vectors"]["inputs_per_s"] > 0
    assert stages["speculation (n-gram)"]["state"] == "not available"
    assert "--engine-arg needs --engine vllm" in stages["speculation (n-gram)"]["reason"]


@pytest.mark.campaign
@pytest.mark.long  # it needs minutes; the rehearsal runs its stages
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (wheels.ROOT / ".venv-vllm").exists(), reason="there is no vLLM here")
def test_the_whole_check_runs_with_vllm(tmp_path: Path, bare_python: Path) -> None:
    """On a CPU, with tiny shapes."""
    options = ("--device", "cpu", "--tiny", "--budget-s", "840", "--start-s", "500")
    assert_measured(check(bare_python, tmp_path / "out", *options))


def test_what_a_server_refuses_is_said_and_is_no_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise NotAvailable("400: no schema beside drafts")

    record = Record(tmp_path, time.monotonic() + 100)
    record.run("drafts", 0.0, refuse)
    assert record.has_passed()
    line = "drafts: not available: 400: no schema beside drafts"
    assert line in capfd.readouterr().err.splitlines()
    page = (tmp_path / "gpu-check.md").read_text()
    assert "| drafts | not available | 0.0 |  | 400: no schema beside drafts |" in page


@pytest.mark.campaign
def test_without_a_gpu_the_check_exits_with_its_own_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a script can distinguish it from a failure."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert main(["--out", str(tmp_path)]) == 2

    assert "no CUDA device" in capfd.readouterr().err


GB = 10**9


@pytest.mark.parametrize(
    ("free_bytes", "name", "num_out"),
    [
        (7 * GB, "Qwen3-0.6B", 128),
        (25 * GB, "Qwen3-0.6B", 128),
        (44 * GB, "Qwen3-1.7B", 128),
        (84 * GB, "Qwen3-4B", 128),
        (149 * GB, "Qwen3-8B", 256),
    ],
)
def test_the_model_suits_the_card(free_bytes: int, name: str, num_out: int) -> None:
    shape = shape_for(free_bytes)

    assert (shape.name, output_tokens(shape, free_bytes, 512, 128)) == (name, num_out)


def test_a_shape_counts_its_weights() -> None:
    decoder = random_decoder(TINY.config(), CPU, torch.float32)

    counted = sum(p.numel() for p in decoder.parameters() if p.ndim == 2)

    assert TINY.num_weights() == counted
    assert [round(shape.num_weights() / 1e9, 1) for shape in SHAPES] == [0.8, 2.0, 4.4, 8.2, 14.8]


def test_what_does_not_fit_into_the_time_is_skipped(tmp_path: Path) -> None:
    """Neither does it take the time of what is more important and comes later. What is written is
    complete after each stage."""
    now_s = 0.0
    record = Record(tmp_path, 100.0, clock_s=lambda: now_s)
    seen = []

    def slow() -> None:
        nonlocal now_s
        now_s += 60.0
        seen.append(json.loads((tmp_path / "gpu-check.json").read_text())["a"]["state"])

    record.run("a", 50.0, slow)
    record.run("b", 30.0, slow, later_s=20.0)
    record.run("c", 30.0, lambda: None, later_s=10.0)

    written = json.loads((tmp_path / "gpu-check.json").read_text())
    assert seen == ["interrupted"]
    assert [written[name]["state"] for name in "abc"] == ["done", "skipped", "done"]
    assert written["a"]["seconds"] == 60.0
    page = (tmp_path / "gpu-check.md").read_text()
    assert "| b | skipped |  |  | needs about 30 s besides 20 s for later stages; 40 s are" in page


def test_a_failed_stage_or_check_fails_the_whole(tmp_path: Path) -> None:
    """What ran out of time does not."""

    def fail(exc: Exception) -> None:
        raise exc

    record = Record(tmp_path, time.monotonic() + 100)
    record.run("a", 0.0, lambda: fail(TimeoutError()))
    record.check("c", "norm", Finding(True, "off by 0"))
    assert record.has_passed()
    assert [found.get("state") for found in record.stages.values()] == ["cut short", None]

    failed = Record(tmp_path, time.monotonic() + 100)
    failed.run("a", 0.0, lambda: fail(ValueError("lost")))
    assert not failed.has_passed()
    assert "| a | failed | 0.0 |  | ValueError: lost |" in (tmp_path / "gpu-check.md").read_text()
    record.check("c", "gate", Finding(False, "off by 1"))
    assert not record.has_passed()
    assert "- gate FAILED: off by 1" in (tmp_path / "gpu-check.md").read_text()


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_program_that_is_too_slow_ends_with_its_children(tmp_path: Path) -> None:
    lines: list[str] = []

    with pytest.raises(TimeoutError):
        run_program([sys.executable, "-c", PARENT], tmp_path / "log", 3.0, lines.append)

    assert not is_alive(int(lines[0]))


def test_a_server_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the last lines of its log; at the end of its time too, and then it is gone, though its
    child does not end with it."""
    monkeypatch.setattr(processes, "_GRACE_S", 1.0)
    broken = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(NotStarted, match="ended with status 1: no such model"),
        running_server(broken, tmp_path / "broken", "ready (.*)", 60.0),
    ):
        pass
    with (
        pytest.raises(NotStarted, match=r"not ready within 2 s: \d+$"),
        running_server([sys.executable, "-c", PARENT], tmp_path / "slow", "ready (.*)", 2.0),
    ):
        pass
    assert not is_alive(int((tmp_path / "slow").read_text()))


def test_what_was_started_ends_with_a_check_that_is_killed() -> None:
    code = """
import sys, time; from pathlib import Path; from bench.processes import started
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
with started(sleeper, Path("/dev/null")) as process:
    print(process.pid, flush=True)
    time.sleep(600)
"""
    check = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with check:
        assert check.stdout is not None
        fd = os.pidfd_open(int(check.stdout.readline()))
        check.kill()

    readable, _, _ = select.select([fd], [], [], 60.0)
    os.close(fd)
    assert readable


@pytest.mark.timeout(120)
@pytest.mark.campaign
def test_a_lost_token_is_far_behind_the_models_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real server, called by two processes: its own answer is its choice, and one with a token
    left out or repeated is not."""
    monkeypatch.setattr(calls, "_STREAMS_EACH", 1)
    save_model(TINY, CPU, torch.float32, tmp_path / "model")
    command = [sys.executable, "-m", "infra", "up", "--port=0", f"--model={tmp_path / 'model'}"]
    command += ["--engine=own", f"--served-model-name={calls.MODEL}"]
    command += ["--kv-cache-gib=0.01", "--threads=1"]
    workload = log_uniform_workload(
        2, TINY.vocab_size, prompt_tokens=(6, 6), output_tokens=(20, 20)
    )

    with running_server(command, tmp_path / "log", UP_IS_READY, 100.0) as server:
        run, found = calls.measure(server, workload, 60.0)
        [request, _], answer = run.load.workload.requests, run.calls[0].token_ids
        wrong = [answer[:9] + answer[10:], answer[:9] + answer[8:]]
        behind = [calls.behind(server, request, text) for text in (answer, *wrong)]

    assert found["tokens_per_s"] > 0
    assert [len(call.token_ids) for call in run.calls] == [20, 20]
    assert behind[0] < 0.01
    assert all(far > calls.MOST_BEHIND for far in behind[1:])


def test_the_gpus_utilisation_is_read_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nvidia-smi prints it; a sample that it cannot take, and half a line, are left out."""
    now = datetime(2026, 11, 26, 22, 30, 11, 250_000)
    line = now.strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
    program, begun = tmp_path / "nvidia-smi", tmp_path / "begun"
    os.mkfifo(begun)
    lines = f"{line}, 98\\n{line}, [N/A]\\n{line}"
    program.write_text(f"#!/bin/sh\nprintf '{lines}'\necho >{begun}\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    with calls.utilisation() as samples:
        begun.read_text()

    assert samples == [(now.timestamp(), 98.0)]


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
    ]
