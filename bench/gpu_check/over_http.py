"""Measures what callers get: the shape behind `batchway up` on this device, and a worker that
dies."""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu_check.machine import Machine
from bench.gpu_check.results import Finding, Results
from bench.gpu_check.served import at_once
from bench.gpu_check.shapes import random_decoder
from bench.gpu_check.sizes import Sizes
from bench.models import save_tokenizer
from bench.pipe import Server, running_server
from bench.processor_time import below, part_of
from infra.measure.http_calls import Caller, Outcome
from infra.measure.load import Load, LoadRun, run_load
from infra.measure.workloads import Workload
from infra.tables import spread

_MODEL = "m"
_TIMEOUT_S = 240.0
_SAMPLE_MS = 200


def measure_http(machine: Machine, sizes: Sizes, results: Results) -> None:
    """Saves random weights of the shape, serves them, and calls. `killed prompts` and
    `killed tokens` are those of the streams whose worker died."""
    with tempfile.TemporaryDirectory() as folder:
        _save(machine, sizes, Path(folder))
        arguments = [f"--model={folder}", f"--served-model-name={_MODEL}"]
        if machine.device.type == "cpu":
            arguments += ["--device=cpu", "--kv-cache-gib=0.01", "--threads=1"]
        with running_server(arguments) as server:
            calls = _Calls(sizes, server)
            # The first time is not counted: it compiles.
            results.measure("warm-up", "http", partial(_time, calls, sizes.streams[1], 0))
            for n in sizes.streams:
                results.measure("http", str(n), partial(_time, calls, n, 1))
            results.check("a killed worker", partial(_kill, calls, results))
            for number in range(1, sizes.num_repeats):
                for n in sizes.streams:
                    results.measure("http", str(n), partial(_time, calls, n, number + 1))


def _save(machine: Machine, sizes: Sizes, folder: Path) -> None:
    decoder = random_decoder(sizes.decoding, machine.dtype, machine.device)
    decoder.save_pretrained(folder)
    save_tokenizer(folder, sizes.decoding.vocab_size)
    del decoder
    machine.release()


class _Calls:
    """Greedy completions over HTTP, all of a workload at once."""

    def __init__(self, sizes: Sizes, server: Server) -> None:
        self.sizes = sizes
        self.server = server

    def workload(self, sizes: tuple[int, int, int], seed: int) -> Workload:
        """`sizes`: requests, prompt tokens, output tokens."""
        return at_once(self.sizes.decoding, sizes, seed)

    def run(self, workload: Workload) -> LoadRun:
        return asyncio.run(self._run(workload))

    async def _run(self, workload: Workload) -> LoadRun:
        async with self.server.client(_TIMEOUT_S) as client:
            load = Load(workload, is_open=False, max_concurrency=len(workload.requests))
            return await run_load(Caller(client, _MODEL), load)


def _time(calls: _Calls, num_streams: int, seed: int) -> dict[str, Any]:
    """Seconds; `utilisation`: samples of the GPU's, in percent."""
    workload = calls.workload((num_streams, calls.sizes.num_in, calls.sizes.num_out), seed)
    with _utilisation() as samples:
        run = calls.run(workload)
    if any(made.outcome is not Outcome.SUCCEEDED for made in run.calls):
        raise RuntimeError(f"a call failed{_reasons(run)}")
    return {
        "tokens_per_s": sum(made.num_output_tokens for made in run.calls) / run.wall_s,
        "wall_s": run.wall_s,
        "first_token_s": spread([made.ttft_from_sending_s or 0.0 for made in run.calls]),
        "between_tokens_s": spread([itl for made in run.calls for itl in made.itls_s]),
        "utilisation": samples,
    }


def _kill(calls: _Calls, results: Results) -> Finding:
    """Kills the worker and its engine while streams run; another worker goes on with them."""
    workload = calls.workload(calls.sizes.killed, seed=99)
    calm = calls.run(workload)
    after_s = calm.wall_s * random.Random(7).uniform(0.4, 0.6)
    timer = threading.Timer(after_s, _kill_worker, [calls.server.pid])
    timer.start()
    run = calls.run(workload)
    timer.join()
    tokens = [made.token_ids for made in run.calls]
    results.put("killed prompts", [request.prompt_token_ids for request in workload.requests])
    results.put("killed tokens", tokens)
    num_streams, _, num_out = calls.sizes.killed
    num_ended = sum(made.outcome is Outcome.SUCCEEDED for made in run.calls)
    num_whole = sum(len(token_ids) == num_out for token_ids in tokens)
    num_equal = sum(a.token_ids == b for a, b in zip(calm.calls, tokens, strict=True))
    gap_s = max((max(made.itls_s) for made in run.calls if made.itls_s), default=0.0)
    num_hit = sum(
        any(a < after_s < b for a, b in itertools.pairwise(made.chunk_times_s))
        for made in run.calls
    )
    return Finding(
        num_ended == num_whole == num_streams and num_hit > 0,
        f"after {after_s:.1f} s, {num_hit} of {num_streams} streams running; {num_ended} ended, "
        f"{num_whole} with as many tokens as asked for, {num_equal} with those of an undisturbed "
        f"run; longest gap {gap_s:.1f} s{_reasons(run)}",
    )


def _kill_worker(pid: int) -> None:
    for child in below(pid):
        with contextlib.suppress(OSError):  # it has ended
            if part_of(child) in ("engine", "worker's supervisor"):
                os.kill(child, signal.SIGKILL)


def _reasons(run: LoadRun) -> str:
    found = sorted({made.reason for made in run.calls if made.reason})
    return f" ({', '.join(found)})" if found else ""


@contextlib.contextmanager
def _utilisation() -> Iterator[list[float]]:
    """The GPU's utilisation in percent, as nvidia-smi samples it; empty without it. Complete at
    exit."""
    samples: list[float] = []
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen(  # noqa: S603  # our own arguments
            [*command, f"--loop-ms={_SAMPLE_MS}"], stdout=subprocess.PIPE, text=True
        )
    except OSError:
        yield samples
        return
    try:
        yield samples
    finally:
        process.terminate()
        output, _ = process.communicate()
        samples += [float(line) for line in output.split() if line.replace(".", "").isdigit()]
