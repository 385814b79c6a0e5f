"""Replays a run in `batchway simulate`.

    python -m tests.chaos.replay [--faults 60]                          resumes and lost work
    python -m tests.chaos.replay --faults 0 --places 8 --rate 12        refusals

A fleet of the hash model, whose steps sleep, answers drawn requests and is recorded while workers
and engines are killed. Step times are fitted to a run before it, at a rate that the fleet can bear;
the same arrivals and faults are simulated. Prints figures of both, and the simulation's error.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.simulated import write_trace
from bench.tables import markdown_table
from infra.planning.calibration import compared, fleet_with, outcome_of, simulate
from infra.planning.costs import fit_costs
from infra.planning.simulation import Fault, FaultKind
from infra.planning.traces import Recorded, RecordedFleet, read_arrivals, read_recording
from tests.chaos.fleet import Fleet, FleetOptions
from tests.chaos.parts import NAMESPACE, WorkerPart
from tests.fakes import HashModelOptions
from workers.ipc.messages import EngineOptions

_NUM_WORKERS = 3
_FIT_S = 60.0
_FIT_RATE_PER_S = 0.4  # for each place of a worker: less than half of what three can bear
_GAP_S = 5.0  # between two faults: a worker is ready again before the next
_MODEL = HashModelOptions(num_blocks=4096, max_model_len=1024, eos_rate=0.0, step_s=0.06)
_LEASE_S = 10.0  # as simulated
_LANE_BOUND_S = "5"  # of gateways: calls that would wait longer are refused
_KINDS: tuple[FaultKind, ...] = ("kill", "engine")
_SETTLED_S = 15.0  # after the start of a run, and after its last fault


async def _program(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "infra", *arguments,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip


async def _run(
    fleet: Fleet, trace: Path, out: Path, faults: Sequence[Fault] = ()
) -> tuple[RecordedFleet, list[Recorded], list[float]]:
    """Sends the requests of the trace, and inflicts the faults. Returns the recording, and how long
    a worker took each time from its death to its readiness."""
    recorder = await _program(
        "record", f"--out={out}", f"--redis-url={fleet.redis_url}", f"--namespace={NAMESPACE}"
    )
    try:
        callers = await _program(
            "bench", "serve", f"--base-url={fleet.gateway_urls()[0]}/v1", f"--trace={trace}",
            "--vocab-size=256", "--warm-up=0",
        )  # fmt: skip
        loads_s = await _inflict(fleet.workers, faults)
        assert await callers.wait() == 0
    finally:
        recorder.send_signal(signal.SIGINT)
        await recorder.wait()
    recorded, jobs = read_recording(out)
    return recorded, jobs, loads_s


async def _inflict(parts: Sequence[WorkerPart], faults: Sequence[Fault]) -> list[float]:
    started_s, loads_s = time.monotonic(), []
    order = list(parts)  # of their starts, as in a simulation
    for fault in faults:
        await asyncio.sleep(max(0.0, started_s + fault.at_s - time.monotonic()))
        assert fault.worker is not None
        part, begun_s = order[fault.worker], time.monotonic()
        if fault.kind == "kill":
            part.end()
            part.start()
            await part.until_ready()
            order.append(order.pop(fault.worker))
        else:
            pid, times_ready = await part.engine_pid(), part.times_ready()
            assert pid is not None
            part.send_to(pid, signal.SIGKILL)
            await part.until_ready(times_ready + 1)
        loads_s.append(time.monotonic() - begun_s)
    return loads_s


async def compare(options: argparse.Namespace, folder: Path) -> str:
    """The table."""
    rng = random.Random(options.seed)
    faults = [
        Fault(_SETTLED_S + _GAP_S * number, rng.choice(_KINDS), worker=rng.randrange(_NUM_WORKERS))
        for number in range(options.faults)
    ]
    trace = folder / "trace.csv"
    seconds = faults[-1].at_s + _SETTLED_S if faults else options.seconds
    fit_rate = _FIT_RATE_PER_S * options.places
    worker = {"lease_s": _LEASE_S, "engine": {"max_num_seqs": options.places}}
    terms = FleetOptions(
        num_workers=_NUM_WORKERS, num_gateways=1, num_callbacks=0, hash_model=_MODEL, worker=worker
    )
    async with Fleet(terms, rng) as fleet:
        write_trace(trace, fit_rate, _FIT_S, f"{options.seed} fit")
        recorded, fit_jobs, _ = await _run(fleet, trace, folder / "fit.jsonl")
        costs = fit_costs(recorded, fit_jobs)
        write_trace(trace, options.rate or fit_rate, seconds, str(options.seed))
        _, jobs, loads_s = await _run(fleet, trace, folder / "run.jsonl", faults)
    jobs = jobs[len(fit_jobs) :]
    load_s = statistics.fmean(loads_s or [0.0])
    arrivals = list(read_arrivals(trace))
    engine = EngineOptions(model_path="", max_num_seqs=costs.max_num_seqs)
    workers = replace(fleet_with(costs, engine, _NUM_WORKERS), load_s=load_s)
    found, real = simulate(workers, arrivals, faults), outcome_of(jobs)
    pairs: dict[str, tuple[float, float]] = {
        "resumes": (sum(job.attempts - 1 for job in jobs), found.num_resumes),
        "tokens computed again": (
            sum(job.recomputed_tokens for job in jobs), found.num_recomputed_tokens
        ),
        "refused": (len(arrivals) - len(jobs), found.states.get("refused", 0)),
        **compared(real, found),
    }  # fmt: skip
    title = f"{len(arrivals)} requests, {options.faults} faults, ready again after {load_s:.1f} s"
    rows = [(title, "recorded", "simulated", "error")]
    for name, (seen, simulated) in pairs.items():
        error = f"{simulated / seen - 1:+.0%}" if seen else ""
        rows.append((name, f"{seen:,.5g}", f"{simulated:,.5g}", error))
    return markdown_table(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--places", type=int, default=32, help="of each worker")
    parser.add_argument("--rate", type=float, help="requests per second (default: a light load)")
    parser.add_argument("--seconds", type=float, default=120.0, help="without faults")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ["BATCHWAY_LANE_BOUND_S"] = _LANE_BOUND_S  # of the simulation's gateway too
    with tempfile.TemporaryDirectory() as folder:
        print(asyncio.run(compare(options, Path(folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
