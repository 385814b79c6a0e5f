"""Measures this machine's GPU; see scripts/gpu-check. Stages run in the order of their importance.

Exit status 0: all checks passed; 1: one failed, or a stage did; 2: there is no GPU. This process
uses no device. What needs one runs in a process of its own.
"""

import argparse
import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.gpu_check.calls import MODEL, kill_worker, measure
from bench.gpu_check.record import NO_GPU, Record, report
from bench.processes import ROOT, UP_IS_READY, NotStarted, Server, run_program, running_server, tail
from infra.measure.load import LoadRun
from infra.measure.workloads import Workload, log_uniform_workload

# Seconds that a stage takes on a recent card; it is not started with less.
_MACHINE_S, _ENGINE_S = 30.0, 90.0
_RECOVERY_S = 25.0  # beside a start: until a worker is missed, and to compare tokens
_WARM_UP_SHARE = 8  # a warm-up's outputs are so many times shorter
_IMPORT_S = 120.0
_LONGEST = 4096  # tokens of a request
# Nothing is fetched. On a CPU vLLM's own default is most of the memory, in GiB.
_VLLM = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=ROOT / "build" / "gpu-check",
        help="gpu-check.json, gpu-check.md, and the servers' logs (default: build/gpu-check)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes, to try the check itself; needed on a CPU"
    )
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="of all stages (default: %(default).0f)"
    )
    parser.add_argument(
        "--start-s", type=float, default=240.0, help="of a server's start (default: %(default).0f)"
    )
    options = parser.parse_args(argv)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu runs the check itself on --tiny sizes, and measures nothing")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for path in (*out.glob("gpu-check.*"), *out.glob("*.log")):
        path.unlink()
    record = Record(out, time.monotonic() + options.budget_s)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        plan = Plan(record, out, model, options.device, options.tiny, options.start_s)
        if not plan.run():
            print("gpu-check: torch finds no CUDA device here", file=sys.stderr)
            return NO_GPU
    print(report(record.stages))
    return 0 if record.has_passed() else 1


@dataclass(frozen=True, slots=True)
class _Engine:
    """A server to measure. `url`: of vLLM's own; batchway's says its address when it is ready."""

    name: str
    command: list[str]
    url: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """`out` gets the logs, `folder` the model; a server has `start_s` to start."""

    record: Record
    out: Path
    folder: Path
    device: str
    is_tiny: bool
    start_s: float

    def run(self) -> bool:
        """Runs all stages; one that fails does not stop the others. Returns whether there is a
        device."""
        self.record.run("machine", _MACHINE_S, self._measure_machine)
        machine = self.record.stages["machine"]
        if machine.get("status") == NO_GPU:
            return False
        if "model" in machine:
            engines = self._engines()
            for number, engine in enumerate(engines, 1):
                self._run_engine(engine, _ENGINE_S * (len(engines) - number))
        return True

    def _measure_machine(self) -> None:
        """Runs `machine`. Raises TimeoutError, RuntimeError."""
        command = [sys.executable, "-m", "bench.gpu_check.machine"]
        command += [f"--folder={self.folder}", f"--device={self.device}"]
        log = self.out / "machine.log"

        def take(line: str) -> None:
            with contextlib.suppress(ValueError, TypeError):  # a line of a library
                self.record.put("machine", **json.loads(line))

        tiny = ["--tiny"] if self.is_tiny else []
        status = run_program([*command, *tiny], log, self.record.left_s, take)
        self.record.put("machine", status=status)
        if status:
            raise RuntimeError(f"it ended with status {status}: {tail(log)}")

    def _engines(self) -> list[_Engine]:
        """Returns batchway with both engines and vLLM's own server, as far as vLLM is here."""
        machine, is_cuda = self.record.stages["machine"], self.device == "cuda"
        longest = min(_LONGEST, machine["model"]["max_position_embeddings"])
        common = [f"--model={self.folder}", f"--served-model-name={MODEL}"]
        common += [f"--dtype={'bfloat16' if is_cuda else 'float32'}", f"--max-model-len={longest}"]
        common += [f"--max-num-seqs={max(machine['streams'])}"]
        up = [sys.executable, "-m", "infra", "up", "--port=0", f"--device={self.device}", *common]
        on_cpu = [] if is_cuda else ["--kv-cache-gib=0.03", "--threads=1"]
        own = _Engine("batchway, own", [*up, "--engine=own", *on_cpu])
        if (vllm := _vllm_python()) is None:
            for name in ("batchway, vLLM", "vllm serve"):
                reason = "vLLM is in neither this Python nor .venv-vllm"
                self.record.put(name, state="absent", reason=reason)
            return [own]
        python, version = vllm
        self.record.put("machine", about={"vllm": version})
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        # `vllm serve` without its command, which needs metadata that vllm-cpu does not have.
        serve = [python, "-m", "vllm.entrypoints.openai.api_server", *common]
        return [
            _Engine("batchway, vLLM", [*up, "--engine=vllm", f"--engine-python={python}"]),
            own,
            _Engine(
                "vllm serve",
                [*serve, "--host=127.0.0.1", f"--port={port}"],
                f"http://127.0.0.1:{port}",
            ),
        ]

    def _run_engine(self, engine: _Engine, later_s: float) -> None:
        """Starts an engine, runs its loads, and kills batchway's worker if there is time."""
        measured: list[tuple[Server, LoadRun]] = []
        with contextlib.ExitStack() as stack:

            def loads() -> None:
                limit_s = min(self.start_s, self.record.left_s)
                log = self.out / f"{engine.name.replace(', ', '-').replace(' ', '-')}.log"
                is_own_python = engine.command[0] == sys.executable
                environment = _VLLM if is_own_python else _VLLM | {"PYTHONPATH": ""}
                ready = "(Application startup complete)" if engine.url else UP_IS_READY
                starting = running_server(engine.command, log, ready, limit_s, environment)
                try:
                    server = stack.enter_context(starting)
                except NotStarted as exc:
                    if limit_s < self.start_s:
                        raise TimeoutError from exc
                    raise
                server = replace(server, url=engine.url or server.url)
                measured.append((server, self._loads(engine.name, server)))

            self.record.run(engine.name, _ENGINE_S, loads, later_s=later_s)
            if measured and not engine.url:
                [(server, calm)] = measured
                needs_s = server.start_s + _RECOVERY_S + 2 * calm.wall_s
                stage = f"killed worker, {engine.name.rpartition(' ')[2]}"
                kill = partial(self._kill, stage, server, calm)
                self.record.run(stage, needs_s, kill, later_s=later_s)

    def _loads(self, name: str, server: Server) -> LoadRun:
        """Returns the run of the middle number of streams."""
        machine, record = self.record.stages["machine"], self.record
        record.put(name, start_s=round(server.start_s, 1))

        def draw(num_streams: int, seed: str, num_out: int) -> Workload:
            """Greedy requests of one length, drawn by a seed: every server gets the same."""
            vocab_size, num_in = machine["model"]["vocab_size"], machine["num_in"]
            lengths = {"prompt_tokens": (num_in,) * 2, "output_tokens": (num_out,) * 2}
            return log_uniform_workload(num_streams, vocab_size, seed=seed, **lengths)

        short = machine["num_out"] // _WARM_UP_SHARE
        measure(server, draw(max(machine["streams"]), "warm-up", short), record.left_s)
        runs = []
        for num_streams in machine["streams"]:
            workload = draw(num_streams, f"load {num_streams}", machine["num_out"])
            run, found = measure(server, workload, record.left_s)
            record.put(name, loads={str(num_streams): found})
            runs.append(run)
        return runs[len(runs) // 2]

    def _kill(self, stage: str, server: Server, calm: LoadRun) -> None:
        finding, figures = kill_worker(server, calm, self.record.left_s)
        self.record.put(stage, **figures)
        self.record.check(stage, stage, finding)


def _vllm_python() -> tuple[str, str] | None:
    """An interpreter that imports vLLM, and its version: this one, or .venv-vllm's."""
    own = [sys.executable] if importlib.util.find_spec("vllm") else []
    beside = ROOT / ".venv-vllm" / "bin" / "python"
    for python in [*own, *([str(beside)] if beside.exists() else [])]:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            code = "import vllm; print('version', vllm.__version__)"
            output = subprocess.check_output(  # noqa: S603  # our own arguments
                [python, "-c", code], stderr=subprocess.DEVNULL, text=True, timeout=_IMPORT_S
            )
            return python, output.rpartition("version ")[2].strip()
    return None


if __name__ == "__main__":
    sys.exit(main())
