"""The stages, most important first. Each engine starts once: its worker is killed after its loads.

This process uses no device. What needs one runs in a process of its own.
"""

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.gpu_check.calls import MODEL, Requests, kill_worker, measure
from bench.gpu_check.record import Record, Unfinished
from bench.gpu_check.sanitizer import STAGE as SANITIZER
from bench.gpu_check.sanitizer import check_memory
from bench.gpu_check.wheels import ROOT
from bench.processes import UP_IS_READY, NotStarted, Server, run_program, running_server, tail
from infra.measure.load import LoadRun

_NO_GPU = 2
# Seconds that a stage takes on a recent card; it is not started with less.
_NEEDS_S = {"machine": 30.0, "self-test": 40.0, "engine": 90.0, "strategies": 60.0, SANITIZER: 30.0}
_RECOVERY_S = 25.0  # beside a start: until a worker is missed, and to compare tokens
_WARM_UP_SHARE = 8  # a warm-up's outputs are so many times shorter
_IMPORT_S = 120.0
_LONGEST = 4096  # tokens of a request
# Nothing is fetched. On a CPU vLLM's own default is most of the memory, in GiB.
_VLLM = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


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
        self._run_inside("machine")
        machine = self.record.stages["machine"]
        if machine.get("status") == _NO_GPU:
            return False
        self._run_inside("self-test")
        if "model" in machine:
            self._run_engines(_vllm_python())
            self._run_inside("strategies")
        if self.device == "cuda":
            work = partial(check_memory, self.record, self.out / "sanitizer.log")
            self.record.run(SANITIZER, _NEEDS_S[SANITIZER], work)
        return True

    def _run_inside(self, stage: str) -> None:
        self.record.run(stage, _NEEDS_S[stage], partial(self._inside, stage))

    def _inside(self, stage: str) -> None:
        """Runs a stage of `inside`. Raises TimeoutError, RuntimeError."""
        command = [sys.executable, "-m", "bench.gpu_check.inside", stage]
        command += [f"--folder={self.folder}", f"--device={self.device}"]
        log = self.out / "inside.log"

        def take(line: str) -> None:
            with contextlib.suppress(ValueError, TypeError):  # a line of a library
                self.record.put(stage, **json.loads(line))

        interpreted = {} if self.device == "cuda" else {"TRITON_INTERPRET": "1"}
        tiny = ["--tiny"] if self.is_tiny else []
        status = run_program([*command, *tiny], log, self.record.left_s, take, interpreted)
        self.record.put(stage, status=status)
        if status:
            raise RuntimeError(f"it ended with status {status}: {tail(log)}")

    def _run_engines(self, vllm: tuple[str, str] | None) -> None:
        """`vllm`: its interpreter and version."""
        each_s, absent = _NEEDS_S["engine"], "vLLM is in neither this Python nor .venv-vllm"
        on_cpu = [] if self.device == "cuda" else ["--kv-cache-gib=0.03", "--threads=1"]
        if vllm is None:
            self.record.put("batchway, vLLM", state="absent", reason=absent)
        else:
            python, version = vllm
            self.record.put("machine", about={"vllm": version})
            command = self._up("--engine=vllm", f"--engine-python={python}")
            self._run_engine("batchway, vLLM", command, UP_IS_READY, later_s=2 * each_s)
        later_s = 0.0 if vllm is None else each_s
        self._run_engine(
            "batchway, own", self._up("--engine=own", *on_cpu), UP_IS_READY, later_s=later_s
        )
        if vllm is None:
            self.record.put("vllm serve", state="absent", reason=absent)
            return
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        # `vllm serve` without its command, which needs metadata that vllm-cpu does not have.
        command = [python, "-m", "vllm.entrypoints.openai.api_server", f"--model={self.folder}"]
        command += [*self._common(), "--host=127.0.0.1", f"--port={port}"]
        ready = "(Application startup complete)"
        self._run_engine("vllm serve", command, ready, url=f"http://127.0.0.1:{port}")

    def _up(self, *arguments: str) -> list[str]:
        command = [sys.executable, "-m", "infra", "up", "--port=0", f"--model={self.folder}"]
        return [*command, f"--device={self.device}", *self._common(), *arguments]

    def _common(self) -> list[str]:
        """The options that all three have under the same names."""
        machine = self.record.stages["machine"]
        dtype = "bfloat16" if self.device == "cuda" else "float32"
        longest = min(_LONGEST, machine["model"]["max_position_embeddings"])
        most = max(machine["streams"])
        limits = [f"--max-model-len={longest}", f"--max-num-seqs={most}"]
        return [f"--served-model-name={MODEL}", f"--dtype={dtype}", *limits]

    def _run_engine(
        self, name: str, command: list[str], ready: str, *, url: str = "", later_s: float = 0.0
    ) -> None:
        """Runs an engine's loads, and kills its worker if there is time. Without `url` the server
        is batchway's."""
        killed: list[tuple[Server, LoadRun]] = []
        with contextlib.ExitStack() as stack:

            def loads() -> None:
                limit_s = min(self.start_s, self.record.left_s)
                log = self.out / f"{name.replace(', ', '-').replace(' ', '-')}.log"
                environment = _VLLM | ({"PYTHONPATH": ""} if command[0] != sys.executable else {})
                starting = running_server(command, log, ready, limit_s, environment)
                try:
                    server = stack.enter_context(starting)
                except NotStarted as exc:
                    if url or limit_s < self.start_s:  # not ours, or out of time
                        raise Unfinished("not started", str(exc)) from exc
                    raise
                server = replace(server, url=f"{url or server.url}/v1")
                killed.append((server, self._loads(name, server)))

            self.record.run(name, _NEEDS_S["engine"], loads)
            if killed and not url:
                server, calm = killed[0]
                needs_s = server.start_s + _RECOVERY_S + 2 * calm.wall_s
                stage = f"killed worker, {name.rpartition(' ')[2]}"
                self.record.run(
                    stage, needs_s, partial(self._kill, stage, *killed[0]), later_s=later_s
                )

    def _loads(self, name: str, server: Server) -> LoadRun:
        """Returns the run of the middle number of streams."""
        machine, record = self.record.stages["machine"], self.record
        record.put(name, start_s=round(server.start_s, 1))
        requests = Requests(machine["model"]["vocab_size"], machine["num_in"], machine["num_out"])
        short = replace(requests, num_out=requests.num_out // _WARM_UP_SHARE)
        measure(server, short.drawn(max(machine["streams"]), "warm-up"), record.left_s)
        runs = []
        for num_streams in machine["streams"]:
            run, found = measure(server, requests.drawn(num_streams, "load"), record.left_s)
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
