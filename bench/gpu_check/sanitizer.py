"""The kernels' checks on small shapes under NVIDIA's compute-sanitizer, where it is installed."""

import os
import shutil
import sys
from pathlib import Path

from bench.gpu_check.record import Finding, Record, Unfinished
from bench.processes import run_program

STAGE = "sanitizer"
TOOLS = ("memcheck", "racecheck")
_TOOLKIT = "/usr/local/cuda/bin"
_LIMIT_S = 120.0  # of each tool


def check_memory(record: Record, log: Path) -> None:
    """Makes one check for each tool. Raises Unfinished, also if a tool's time is up."""
    program = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:{_TOOLKIT}")
    if program is None:
        raise Unfinished("absent", "compute-sanitizer is not on this machine")
    late = []
    for number, tool in enumerate(TOOLS):
        limit_s = min(_LIMIT_S, record.left_s / (len(TOOLS) - number))
        lines: list[str] = []
        command = [
            *(program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"),
            *(sys.executable, "-m", "bench.gpu_check.inside", "kernels", "--tiny"),
        ]
        # Each tensor is an allocation of its own, so that a write behind it is seen.
        own_allocations = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            status = run_program(command, log, limit_s, lines.append, own_allocations)
        except TimeoutError:
            late.append(f"{tool} was not done within {limit_s:.0f} s")
            continue
        text = "".join(lines)
        with log.open("a") as file:
            file.write(text)
        if "not supported" in text:
            raise Unfinished("absent", f"{program} does not support this machine")
        record.check(STAGE, tool, _finding(status, lines))
    if late:
        raise Unfinished("cut short", "; ".join(late))


def _finding(status: int, output: list[str]) -> Finding:
    """The result of a tool, whose own lines begin with signs of equality."""
    lines = [line.strip("= \n") for line in output if line.startswith("=====")]
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), "no summary")
    if status == 0:
        return Finding("SUMMARY" in summary, summary)
    return Finding(False, "; ".join([f"exit status {status}, {summary}", *lines[1:6]]))
