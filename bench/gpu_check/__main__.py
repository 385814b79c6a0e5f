"""Measures this machine's GPU; see scripts/gpu-check. Stages run in the order of their importance.

Exit status 0: all checks passed; 1: one failed, or a stage did; 2: there is no GPU. This process
uses no device. What needs one runs in a process of its own.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu_check.calls import (
    MODEL,
    check_available,
    embed,
    is_list_of_booleans,
    kill_worker,
    measure,
    structured,
)
from bench.gpu_check.record import NO_GPU, Figures, Finding, Record, embedder_of, report
from bench.processes import (
    ROOT,
    UP_IS_READY,
    NotStarted,
    Server,
    address_of,
    run_program,
    started,
    tail,
)
from infra.measure.load import LoadRun
from infra.measure.workloads import Workload, log_uniform_workload

# Seconds that a stage takes on a recent card; it is not started with less.
_MACHINE_S, _START_S, _LOADS_S, _LOAD_S, _OWN_S = 30.0, 90.0, 60.0, 15.0, 60.0
_RECOVERY_S = 25.0  # beside a start: until a worker is missed, and to compare tokens
_LOOK_S = 0.1
_ROUNDS = 2  # of each load, on both servers in turn
_OURS, _THEIRS, _SPECULATION = "batchway, vLLM", "vllm serve", "speculation (n-gram)"
_EMBEDDINGS, _KILL = "embeddings", "killed worker, vLLM"
_SERVE_IS_READY = "(Application startup complete)"
_ON_CPU = ("--kv-cache-gib=0.03", "--threads=1")
_CORES_EACH = 4  # of the machine for each gateway; vLLM, its callers and Redis need some, too
_LEAST_SHARE = 0.05  # of the memory that vLLM wants free; it takes what its KV cache needs
_SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
# Random weights end no text by themselves; this list has an end.
_SCHEMA = {"type": "array", "items": {"type": "boolean"}, "minItems": 30, "maxItems": 30}
_NUM_INPUTS, _INPUTS_EACH = {False: 2048, True: 32}, 16
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
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="tries the check itself, on a CPU, with batchway's own engine in the place of vLLM",
    )
    options = parser.parse_args(argv)
    if options.rehearse:
        options.device, options.tiny = "cpu", True
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
        plan = Plan(
            *(record, out, model, options.device, options.tiny, options.start_s, options.rehearse)
        )
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
    """`out` gets the logs, `folder` the model; the servers have `start_s` to start. A rehearsal has
    batchway's own engine in the place of vLLM, also in that of its server."""

    record: Record
    out: Path
    folder: Path
    device: str
    is_tiny: bool
    start_s: float
    is_rehearsal: bool = False

    def run(self) -> bool:
        """Runs all stages; one that fails does not stop the others. Returns whether there is a
        device."""
        self.record.run("machine", _MACHINE_S, self._measure_machine)
        machine = self.record.stages["machine"]
        if machine.get("status") == NO_GPU:
            return False
        if "model" not in machine:
            return True
        servers: dict[str, Server] = {}
        vllm = ("own", "") if self.is_rehearsal else _vllm_python()
        with contextlib.ExitStack() as stack:
            if vllm is None:
                for name in (_OURS, _THEIRS, _SPECULATION, _EMBEDDINGS, _KILL):
                    reason = "vLLM is in neither this Python nor .venv-vllm"
                    self.record.put(name, state="absent", reason=reason)
            else:
                self.record.put("machine", about={"vllm": vllm[1] or "a stand-in"})
                start = partial(self._start, self._engines(vllm[0]), stack, servers)
                self.record.run("starts", _START_S, start)
                self._run_vllm(servers)
        if not self.is_rehearsal:
            self._run_own()
        return True

    def _run_vllm(self, servers: Mapping[str, Server]) -> None:
        """The stages of the servers that have started, by weight."""
        run = self.record.run
        calm: list[LoadRun] = []
        if _OURS in servers:
            run("streams", _LOADS_S, lambda: calm.append(self._beside(servers)))
            run("structured output", _LOAD_S, partial(self._schema, servers, (_OURS, _THEIRS)))
        if _SPECULATION in servers:
            run("speculation, schema", _LOAD_S, partial(self._schema, servers, (_SPECULATION,)))
        if _EMBEDDINGS in servers:
            run("vectors", _LOAD_S, partial(self._embed, servers[_EMBEDDINGS]))
        if calm:
            server = servers[_OURS]
            needs_s = server.start_s + _RECOVERY_S + 2 * calm[0].wall_s
            run(_KILL, needs_s, partial(self._kill, _KILL, server, calm[0]))

    def _run_own(self) -> None:
        """The own engine, if there is time."""
        command = self._up("--engine=own", *([] if self._is_cuda else _ON_CPU))
        engine, servers = _Engine("batchway, own", command), dict[str, Server]()

        def loads() -> None:
            self._start([engine], stack, servers)
            for num_streams in self._machine["streams"]:
                self._load(servers, engine.name, num_streams)

        with contextlib.ExitStack() as stack:
            self.record.run(engine.name, _OWN_S, loads)

    @property
    def _machine(self) -> dict[str, Any]:
        return self.record.stages["machine"]

    @property
    def _is_cuda(self) -> bool:
        return self.device == "cuda"

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

    def _up(self, *arguments: str) -> list[str]:
        """The command of `batchway up` on the model, with more arguments."""
        return [
            *(sys.executable, "-m", "infra", "up", "--port=0", f"--device={self.device}"),
            *self._common(),
            *arguments,
        ]

    def _common(self) -> list[str]:
        """Arguments of batchway and of vLLM's server."""
        longest = min(_LONGEST, self._machine["model"]["max_position_embeddings"])
        return [
            *(f"--model={self.folder}", f"--served-model-name={MODEL}"),
            f"--dtype={'bfloat16' if self._is_cuda else 'float32'}",
            *(f"--max-model-len={longest}", f"--max-num-seqs={max(self._machine['streams'])}"),
        ]

    def _engines(self, python: str) -> list[_Engine]:
        """The servers that run beside each other, each with its part of the memory: two with the
        KV of all streams."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        engine, url = ["--engine=vllm", f"--engine-python={python}"], f"http://127.0.0.1:{port}"
        # `vllm serve` without its command, which needs metadata that vllm-cpu does not have.
        theirs = [python, "-m", "vllm.entrypoints.openai.api_server", *self._common()]
        theirs += ["--host=127.0.0.1", f"--port={port}"]
        whole, part = list[str](), list[str]()
        if self.is_rehearsal:
            engine, url = ["--engine=own", *_ON_CPU], ""
            theirs = self._up(*engine)
        elif self._is_cuda:
            # What must be free at the start. With the size of its KV cache vLLM measures no memory,
            # so that several may start at once.
            engine.append(f"--engine-arg=gpu_memory_utilization={_LEAST_SHARE}")
            kv_bytes = self._machine["kv_bytes"]
            whole, part = ([f"--kv-cache-gib={n / 2**30:.2f}"] for n in (kv_bytes, kv_bytes / 8))
            theirs += [f"--gpu-memory-utilization={_LEAST_SHARE}"]
            theirs += [f"--kv-cache-memory-bytes={kv_bytes}"]
        num_gateways = max(1, (os.cpu_count() or 1) // _CORES_EACH)
        draft = json.dumps(_SPECULATIVE, separators=(",", ":"))
        drafts = f"--engine-arg=speculative_config={draft}"
        vectors = f"--model={embedder_of(self.folder)}"
        return [
            _Engine(_OURS, self._up(*engine, *whole, f"--gateways={num_gateways}")),
            _Engine(_THEIRS, theirs, url),
            _Engine(_SPECULATION, self._up(*engine, *part, drafts)),
            _Engine(_EMBEDDINGS, self._up(*engine, *part, vectors)),
        ]

    def _start(
        self, engines: Sequence[_Engine], stack: contextlib.ExitStack, servers: dict[str, Server]
    ) -> None:
        """Starts servers at once, and waits until each is ready or has ended. Raises TimeoutError
        if the first is not ready in time, NotStarted if it has ended."""
        begun_s, limit_s = time.monotonic(), min(self.start_s, self.record.left_s)
        waiting = {}
        for engine in engines:
            log = self.out / f"{engine.name.replace(', ', '-').replace(' ', '-')}.log"
            is_own_python = engine.command[0] == sys.executable
            environment = _VLLM if is_own_python else _VLLM | {"PYTHONPATH": ""}
            process = stack.enter_context(started(engine.command, log, environment))
            waiting[engine.name] = engine, process, log
        lost: NotStarted | None = None
        while waiting and time.monotonic() - begun_s < limit_s:
            for name, (engine, process, log) in list(waiting.items()):
                ready = _SERVE_IS_READY if engine.url else UP_IS_READY
                took_s = time.monotonic() - begun_s
                try:
                    address = address_of(process, log, ready)
                except NotStarted as exc:
                    del waiting[name]
                    lost = exc if engine is engines[0] else lost
                    self.record.not_available(name, _reason(str(exc)))
                    continue
                if address is not None:
                    del waiting[name]
                    servers[name] = Server(engine.url or address, process.pid, took_s)
                    self.record.put(name, state="started", start_s=round(took_s, 1))
            time.sleep(_LOOK_S)
        for name in waiting:
            self.record.not_available(name, f"not ready within {limit_s:.0f} s")
        if lost is not None:
            raise lost
        if engines[0].name in waiting:
            raise TimeoutError

    def _draw(self, num_streams: int, seed: str, num_out: int) -> Workload:
        """Greedy requests of one length, drawn by a seed: every server gets the same."""
        vocab_size, num_in = self._machine["model"]["vocab_size"], self._machine["num_in"]
        lengths = {"prompt_tokens": (num_in,) * 2, "output_tokens": (num_out,) * 2}
        return log_uniform_workload(num_streams, vocab_size, seed=seed, **lengths)

    def _load(
        self, servers: Mapping[str, Server], name: str, num_streams: int, share: int = 1
    ) -> tuple[LoadRun, dict[str, Any]]:
        """One load on one server, recorded. `share`: outputs are so many times shorter, which is
        not recorded."""
        num_out = self._machine["num_out"] // share
        workload = self._draw(num_streams, f"load {num_streams} {share}", num_out)
        run, found = measure(servers[name], workload, self.record.left_s)
        if share == 1:
            self.record.put(name, loads={str(num_streams): found})
        return run, found

    def _beside(self, servers: Mapping[str, Server]) -> LoadRun:
        """The same loads on both servers in turn, more than once. Returns a run of ours, of the
        second number of streams."""
        names = [name for name in (_OURS, _THEIRS) if name in servers]
        streams, calm = self._machine["streams"], list[LoadRun]()
        for name in names:
            self._load(servers, name, max(streams), _WARM_UP_SHARE)
        for num_streams in streams:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for _ in range(_ROUNDS):
                for name in names:
                    run, figures = self._load(servers, name, num_streams)
                    found[name].append(figures)
                    if name == _OURS and num_streams == streams[1]:
                        calm.append(run)
            if len(names) == 2:
                self.record.put("beside", shares={str(num_streams): _shares(*found.values())})
        return calm[-1]

    def _schema(self, servers: Mapping[str, Server], names: Sequence[str]) -> None:
        """A load whose outputs follow a schema, on each server. Raises NotAvailable if the first
        refuses it, RuntimeError for an output that does not follow."""
        num_streams = self._machine["streams"][1]
        prompt = [*self._draw(1, "first", 1).requests[0].prompt_token_ids]
        body = {"prompt": prompt, "max_tokens": 8, **structured(_SCHEMA)}
        for name in [each for each in names if each in servers]:
            check_available(servers[name], "completions", body)
            workload = self._draw(num_streams, "schema", self._machine["num_out"])
            run, found = measure(servers[name], workload, self.record.left_s, _SCHEMA)
            self.record.put(f"{name}, a schema", loads={str(num_streams): found})
            ended = [
                call.token_ids
                for call, request in zip(run.calls, workload.requests, strict=True)
                if len(call.token_ids) < request.max_tokens
            ]
            num_wrong = sum(not is_list_of_booleans(self.folder, ids) for ids in ended)
            detail = f"{len(ended)} of {num_streams} outputs ended, {num_wrong} of them no JSON"
            self.record.check(name, f"{name}, a schema", Finding(not num_wrong, detail))

    def _embed(self, server: Server) -> None:
        """Raises NotAvailable."""
        num = _NUM_INPUTS[self.is_tiny]
        inputs = [each.prompt_token_ids for each in self._draw(num, "inputs", 1).requests]
        check_available(server, "embeddings", {"input": [[*inputs[0]]]})
        embed(server, inputs, _INPUTS_EACH)  # a warm-up
        found = embed(server, inputs, _INPUTS_EACH)
        told = "{inputs_per_s:,.0f} inputs/s, {tokens_per_s:,.0f} tokens/s".format(**found)
        self.record.put(_EMBEDDINGS, vectors=found, told=[told])

    def _kill(self, stage: str, server: Server, calm: LoadRun) -> None:
        finding, figures = kill_worker(server, calm, self.record.left_s)
        self.record.put(stage, **figures)
        self.record.check(stage, stage, finding)


def _shares(ours: Sequence[Figures], theirs: Sequence[Figures]) -> list[str]:
    """Our part of their speed and our first token as a multiple of theirs: medians over rounds; and
    the speeds' quotient of each round."""

    def quotients(name: str) -> list[float]:
        return [a[name] / b[name] for a, b in zip(ours, theirs, strict=True)]

    speeds, firsts = quotients("tokens_per_s"), quotients("first_token_s")
    rounds = ", ".join(f"{each:.2f}" for each in speeds)
    return [f"{statistics.median(speeds):.3f}", f"{statistics.median(firsts):.2f}", rounds]


def _reason(text: str) -> str:
    """The last error among the last lines of a log, as NotStarted has them; without one, all."""
    return next((line for line in reversed(text.split(" / ")) if " ERROR " in line), text)


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
