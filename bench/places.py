"""What batchway adds to a host with 256 places that takes 14 ms for a step: python -m bench.places

The host, in the place of vLLM, waits and does not compute. As vLLM's core does, it goes on with the
requests that it has while its engine process hands out tokens and places. It runs alone, with all
sequences at once, and then behind that process, a worker and Redis, or with a gateway as well.
`--before` names another checkout, which takes turns with this one.

`tail`: from the end of the median stream to the last. `processors`: what each part used of them;
"others" is the engine's process.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from bench.processes import UP_IS_READY, processor_s, running_server
from bench.tables import markdown_table
from contract.connection import connect
from contract.function_types import Submission
from contract.functions import Functions
from contract.jobs import Endpoint, Job, SamplingParams
from contract.keys import Keys, new_job_id
from contract.library import ensure_library
from contract.pauses import PauseLine, Pauses
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import EOS_ID, VOCAB_SIZE, hash_tokenizer
from workers.engine.interface import EngineLimits, Sample
from workers.engine.jobs import JobEngine
from workers.engine.sequence import Sequence
from workers.engine.step_plan import StepReport
from workers.engine_process.engine_loop import main as run_engine
from workers.ipc.messages import EngineOptions, EngineReady
from workers.lanes import lanes_of
from workers.vllm_engine.placing import HostOutput, PlacingEngine

STEP_S = 0.014
NUM_PLACES = 256
_CONTEXT, _BLOCK = 4096, 16
_LINE = PauseLine("m", "standard")
_SERVED = ("--engine-module=places", "--model=hash", "--served-model-name=m")


class Variant(NamedTuple):
    """How the streams are called. `states_length`: they end before their cap, when they said."""

    num_streams: int = NUM_PLACES
    num_tokens: int = 512
    n: int = 1  # streams of a job
    states_length: bool = False
    is_http: bool = False


VARIANTS = {
    "ignore_eos": Variant(),
    "stated lengths": Variant(states_length=True),
    "n = 2": Variant(n=2),
    "HTTP": Variant(num_streams=64, is_http=True),
}


class TimedHost:
    """A `Host` of steps of equal length."""

    num_places = NUM_PLACES
    max_model_len = _CONTEXT
    num_step_tokens = 2**20
    num_kv_tokens = NUM_PLACES * _CONTEXT

    def __init__(self) -> None:
        self._requests: dict[Sequence, None] = {}
        self._computing: list[Sequence] = []  # in the step that ends at `_due_s`
        self._due_s = 0.0

    def start(self, sequence: Sequence, priority: int) -> None:
        self._requests[sequence] = None

    def abort(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            self._requests.pop(sequence, None)

    def step(self) -> list[HostOutput]:
        if not self._computing:
            self._computing = list(self._requests)
            self._due_s = time.monotonic() + STEP_S
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        outputs = [self._output(s) for s in self._computing if s in self._requests]
        self._computing = list(self._requests)
        self._due_s += STEP_S
        return outputs

    def count(self, report: StepReport) -> None:
        report.num_running = report.num_step_seqs = len(self._requests)
        report.num_free_blocks = (NUM_PLACES - len(self._requests)) * _CONTEXT // _BLOCK

    def _output(self, sequence: Sequence) -> HostOutput:
        num_output = sequence.num_output + 1
        is_last = num_output in (sequence.max_output, sequence.params.expected_tokens)
        if is_last:
            del self._requests[sequence]
        ends = is_last and not sequence.params.ignore_eos
        token_id = EOS_ID if ends else ord("a") + num_output % 26
        return HostOutput(sequence, (Sample(token_id),), end="length" if is_last else None)


def start_host(
    options: EngineOptions, progress: Callable[[str], None]
) -> tuple[JobEngine, EngineReady, int]:
    limits = EngineLimits(TimedHost.num_step_tokens, NUM_PLACES, VOCAB_SIZE)
    size: Any = VOCAB_SIZE if "vocab_size" in signature(PlacingEngine).parameters else limits
    engine = PlacingEngine(TimedHost(), size, frozenset({EOS_ID}), lanes_of(options.lanes))
    num_blocks = TimedHost.num_kv_tokens // _BLOCK
    ready = EngineReady(
        _CONTEXT, VOCAB_SIZE, (EOS_ID,), hash_tokenizer(), num_blocks, _BLOCK, NUM_PLACES
    )
    return engine, ready, limits.max_num_batched_tokens


def alone_s(variant: Variant) -> float:
    """What the host takes without anything around it."""
    host, params = TimedHost(), _params(variant)
    sequences = [
        Sequence(f"{i}", 1, 0, "t", "", [1], 1, params) for i in range(variant.num_streams)
    ]
    start_s = time.monotonic()
    for sequence in sequences:
        host.start(sequence, 0)
    num_ended = 0
    while num_ended < variant.num_streams:
        for output in host.step():
            output.sequence.token_ids += [sample.token_id for sample in output.samples]
            num_ended += output.end is not None
    return time.monotonic() - start_s


def _params(variant: Variant) -> SamplingParams:
    cap = variant.num_tokens * (2 if variant.states_length else 1)
    return SamplingParams(
        max_tokens=cap,
        seed=1,
        n=variant.n,
        expected_tokens=variant.num_tokens,
        ignore_eos=not variant.states_length,
    )


class Run(NamedTuple):
    """Seconds: of the host alone, until the last and the median stream's end, and of processors."""

    alone_s: float
    wall_s: float
    median_s: float
    processor_s: dict[str, float]


async def through_redis(variant: Variant, folder: Path) -> Run:
    """Submits all jobs to a paused lane, and resumes it when the worker is ready. The Redis clock
    counts, from the first claim on."""
    with EmbeddedRedis() as server:
        client, keys = connect(server.url, Keys("bench")), Keys("bench")
        await ensure_library(client)
        functions, pauses = Functions(client, keys), Pauses(client, keys)
        jobs = [_job(variant) for _ in range(variant.num_streams // variant.n)]
        terms = Submission(variant.n * _params(variant).max_tokens, 600.0, 600.0)
        for job in jobs:
            await functions.submit(job, terms)
        await pauses.pause(_LINE, "operator")
        url, worker = f"--redis-url={server.url}", [sys.executable, "-m", "infra", "worker"]
        command = [*worker, url, "--namespace=bench", *_SERVED]
        with running_server(command, folder / "log", "(ready model)=", 60.0) as process:
            before = processor_s(process.pid) | {"Redis": await _redis_s(client)}
            await pauses.resume(_LINE, "operator")
            while any(  # noqa: ASYNC110
                lane.num_queued + lane.num_running
                for lane in (await functions.snapshot("m", ["standard"])).lanes.values()
            ):
                await asyncio.sleep(0.05)
            spent = processor_s(process.pid) | {"Redis": await _redis_s(client)}
        views = [view for job in jobs if (view := await functions.read(job.id, "t"))]
        await client.aclose()
    assert all(view.num_output_tokens == variant.n * variant.num_tokens for view, _ in views)
    start_ms = min(view.claimed_ms or 0 for view, _ in views)
    ends_s = sorted(((view.finished_ms or 0) - start_ms) / 1000 for view, _ in views)
    return Run(alone_s(variant), ends_s[-1], statistics.median(ends_s), _less(spent, before))


def _job(variant: Variant) -> Job:
    return Job(
        id=new_job_id(),
        tenant="t",
        model="m",
        lane="standard",
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=tuple(range(20)),
        params=_params(variant),
        created_s=0,
    )


async def through_http(variant: Variant, folder: Path) -> Run:
    """The second of two rounds of calls. Its caller is no library: httpx takes longer than all."""
    command = [sys.executable, "-m", "infra", "up", "--port=0", *_SERVED]
    fields = {"model": "m", "prompt": "x" * 20, "max_tokens": variant.num_tokens}
    body = json.dumps(fields | {"ignore_eos": True, "stream": True})
    with running_server(command, folder / "log", UP_IS_READY, 60.0) as server:
        host = server.url.removeprefix("http://")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"

        async def end_s(start_s: float) -> float:
            reader, writer = await asyncio.open_connection(*host.split(":"))
            writer.write((head + body).encode())
            answer = await reader.read()
            writer.close()
            assert b"[DONE]" in answer[-100:]
            return time.monotonic() - start_s

        for _ in range(2):
            before, start_s = processor_s(server.pid), time.monotonic()
            calls = [end_s(start_s) for _ in range(variant.num_streams)]
            ends_s = await asyncio.gather(*calls)
        spent = processor_s(server.pid)
    return Run(alone_s(variant), max(ends_s), statistics.median(ends_s), _less(spent, before))


async def _redis_s(client: object) -> float:
    cpu = await client.info("cpu")  # type: ignore[attr-defined]
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


def _less(spent: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {part: s - before.get(part, 0.0) for part, s in spent.items()}


def measure(name: str) -> Run:
    variant = VARIANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        through = through_http if variant.is_http else through_redis
        return asyncio.run(through(variant, Path(folder)))


def measure_in(checkout: Path, name: str) -> Run:
    """Measures the worker of another checkout, or of this one, in a process of its own."""
    done = subprocess.run(  # noqa: S603
        [sys.executable, __file__, "--once", name],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": f"{checkout}:{Path(__file__).parent}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Run(*json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="default: all")
    parser.add_argument("--once", choices=VARIANTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        print(json.dumps(measure(given.once)))
        return
    checkouts = {"before": given.before} if given.before else {}
    checkouts["this"] = Path(__file__).parents[1]
    found = defaultdict[tuple[str, str], list[Run]](list)
    for _ in range(given.rounds):
        for name in given.variant or VARIANTS:
            for label, checkout in checkouts.items():
                run = measure_in(checkout.absolute(), name)
                found[name, label].append(run)
                print(name, label, run, file=sys.stderr, flush=True)
    head = "variant", "checkout", "alone, s", "wall, s", "ratio", "tail, s", "processors, s"
    print(markdown_table([head, *(_row(*key, runs) for key, runs in found.items())]))


def _row(name: str, label: str, runs: list[Run]) -> tuple[str, ...]:
    """Medians; the processor time of the last run."""
    alone, wall = (statistics.median(values) for values in list(zip(*runs, strict=True))[:2])
    ratio = statistics.median(run.wall_s / run.alone_s for run in runs)
    tail = statistics.median(run.wall_s - run.median_s for run in runs)
    parts = sorted(runs[-1].processor_s.items(), key=lambda part: -part[1])
    spent = ", ".join(f"{part} {s:.1f}" for part, s in parts if s >= 0.05)
    return name, label, f"{alone:.2f}", f"{wall:.2f}", f"{ratio:.3f}", f"{tail:.3f}", spent


if __name__ == "__main__":
    if "--fd" in sys.argv:
        sys.exit(run_engine(start=start_host))
    main()
