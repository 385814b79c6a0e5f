"""A start tells each stage with its seconds, from what vLLM's processes log. Needs no vLLM: the
records are those of its releases, and a process logs as its processes do."""

import logging.config
import os
import queue
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from workers.vllm_engine.stages import Stages

VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
# As vLLM's own: text of warnings on the standard error.
CONFIG: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"vllm": {"class": "logging.StreamHandler", "level": "WARNING"}},
    "loggers": {"vllm": {"handlers": ["vllm"], "level": "WARNING", "propagate": False}},
}
LOGS = """
import json, logging.config, os
logging.config.dictConfig(json.load(open(os.environ["VLLM_LOGGING_CONFIG_PATH"])))
log = logging.getLogger("vllm.model_executor")
log.debug("Loading weights took 9.00 seconds")
log.info("Loading weights took %.2f seconds", 1.234)
log.warning("a warning")
try:
    raise ValueError("no such family")
except ValueError:
    log.exception("WorkerProc failed to start.")
log.error("Engine core initialization failed.")
log.info("Graph capturing finished in 3 secs, took 0.10 GiB")
"""


@pytest.fixture(autouse=True)
def vllm_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How vLLM logs is as before afterwards."""
    monkeypatch.setenv(VARIABLE, "")
    yield
    logging.config.dictConfig({**CONFIG, "handlers": {}, "loggers": {"vllm": {"handlers": []}}})


@pytest.mark.parametrize(
    ("records", "told"),
    [
        (["Loading weights took 2.71 seconds"], ["weights: 2.7 s"]),
        (["torch.compile took 30.04 s in total"], ["compile: 30.0 s"]),
        (["[backbone] torch.compile took 3.96 s in total"], ["compile: 4.0 s"]),
        (
            ["torch.compile and initial profiling/warmup run together took 7.5 s in total"],
            ["compile: 7.5 s"],
        ),
        (["Graph capturing finished in 12 secs, took 0.50 GiB"], ["graphs: 12.0 s"]),
        (
            ["Warming up model for the compilation...", "Warming up done."],
            ["compile: 1.0 s"],
        ),
        (["Initial profiling/warmup run took 1.00 s", "Loading weights", "took 3 s"], []),
    ],
)
def test_a_stage_is_told_once_it_has_ended(records: list[str], told: list[str]) -> None:
    lines: list[str] = []
    stages = Stages(lines.append)
    for now_s, record in enumerate(records):
        stages.take(f"<14>{record}\0", float(now_s))

    assert lines == told
    assert stages.failure == ""


def test_processes_of_vllm_are_heard() -> None:
    """From their level of information on; what they print stays as it was. The last line of their
    first error is why the start fails."""
    lines = queue.Queue[str]()
    stages = Stages(lines.put)
    with stages.listening(CONFIG):
        command = [sys.executable, "-c", LOGS]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        told = [lines.get(timeout=30), lines.get(timeout=30)]

    assert told == ["weights: 1.2 s", "graphs: 3.0 s"]
    assert printed.splitlines()[0] == "a warning"
    assert "Loading weights" not in printed
    assert stages.failure == "ValueError: no such family"
    assert CONFIG["loggers"]["vllm"]["level"] == "WARNING"


def test_an_operator_s_own_log_configuration_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/etc/vllm-log.json")

    with Stages(print).listening(CONFIG):
        assert os.environ[VARIABLE] == "/etc/vllm-log.json"


def test_batchway_s_own_stages_are_timed() -> None:
    lines: list[str] = []

    with Stages(lines.append).timed("imports"):
        assert lines == []

    [line] = lines
    assert re.fullmatch(r"imports: \d+\.\d s", line)
