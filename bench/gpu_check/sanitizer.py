"""The kernels' checks on small shapes under NVIDIA's compute-sanitizer, where it is installed."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.gpu_check.results import Finding, Results

TOOLS = ("memcheck", "racecheck")
_TOOLKIT = "/usr/local/cuda/bin"


def check_memory(results: Results, *, has_gpu: bool) -> None:
    """Makes one check for each tool; `state` tells why there is none."""
    program = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:{_TOOLKIT}")
    if program is None or not has_gpu:
        results.put("state", "compute-sanitizer is not on this machine" if has_gpu else "no GPU")
        return
    results.put("state", program)
    for tool in TOOLS:
        left_s = results.left_s
        try:
            done = _run(program, tool, left_s)
        except subprocess.TimeoutExpired:
            results.skip(f"{tool}: not done within {left_s:.0f} s")
            return
        if "not supported" in done.stdout:
            results.put("state", f"{program} does not support this machine")
            return
        results.check(tool, lambda done=done: _finding(done))  # type: ignore[misc]


def _run(program: str, tool: str, left_s: float) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"),
            *(sys.executable, "-m", "bench.gpu_check.stage", "kernels", "--tiny"),
            *("--seconds", str(left_s), "--out", str(Path(folder) / "kernels.json")),
        ]
        # Each tensor is an allocation of its own, so that a write behind it is seen.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        return subprocess.run(  # noqa: S603  # our own arguments
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=left_s,
        )


def _finding(done: subprocess.CompletedProcess[str]) -> Finding:
    """The result of a tool, whose own lines begin with signs of equality."""
    lines = [line.strip("= ") for line in done.stdout.splitlines() if line.startswith("=====")]
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), "no summary")
    if done.returncode == 0:
        return Finding("SUMMARY" in summary, summary)
    return Finding(False, "; ".join([f"exit status {done.returncode}, {summary}", *lines[1:6]]))
