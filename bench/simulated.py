"""Compares `batchway simulate` with what it simulates, on this machine.

    python -m bench.simulated [--seconds N] [--model demo] [--model M] [--json OUT]

For each model and number of workers: one run with continuous batching is recorded, and step times
are fitted to it. Then all strategies run at both loads, are recorded, and simulated with that fit.
The recorded times are those of the log: from admission to the token in Redis. The first runs are
not compared; their load is a third one, between the two.
"""

import argparse
import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.models import make_model
from bench.processes import ROOT, running_batchway
from bench.tables import markdown_table
from infra.measure.workloads import draw_arrivals
from infra.planning.calibration import compared, fleet_with, outcome_of, simulate
from infra.planning.costs import fit_costs
from infra.planning.traces import Recorded, read_arrivals, read_recording
from workers.ipc.messages import EngineOptions, StrategyOptions

_STRATEGIES = {
    "continuous": StrategyOptions(),
    "dynamic": StrategyOptions(name="dynamic"),
    "static": StrategyOptions(name="static"),
}
_SECONDS = {"demo": 40.0, "M": 60.0}  # of a run: a fit needs 64 jobs
_PROMPTS, _OUTPUTS = (32, 512), (16, 128)  # log-uniform
# Requests per second of each worker: low, of the fit, high. Two workers share this machine's cores,
# so each gets half.
_RATES = {
    ("demo", 1): (6.0, 10.0, 14.0),
    ("demo", 2): (3.0, 5.0, 7.0),
    ("M", 1): (0.8, 1.2, 1.6),
    ("M", 2): (0.5, 0.75, 1.0),
}
_HEADING = ("model", "workers", "strategy", "load", "tokens/s", "first token p50", "p99",
            "between tokens p50", "answer p50", "p99", "refused")  # fmt: skip


def write_trace(path: Path, rate_per_s: float, seconds: float, seed: str) -> None:
    """Draws arrivals and lengths for so long."""
    rng = random.Random(seed)

    def length(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    arrivals = draw_arrivals(int(rate_per_s * seconds), rate_per_s, "poisson", 1.0, seed)
    rows = [f"{at_s:.4f},{length(*_PROMPTS)},{length(*_OUTPUTS)}" for at_s in arrivals]
    path.write_text(
        "\n".join(["arrival_s,prompt_tokens,max_tokens", *rows]) + "\n", encoding="utf-8"
    )


def record(
    arguments: Sequence[str],
    trace: Path,
    out: Path,
    vocab_size: int,
) -> tuple[Any, list[Recorded], dict[str, Any]]:
    """Runs the trace on a fleet of its own. Returns the recording, and the callers' figures."""
    with running_batchway(arguments) as server:
        recorder = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "infra", "record", f"--out={out}"],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )
        callers = out.with_suffix(".callers.json")
        subprocess.run(  # noqa: S603
            [sys.executable, "-m", "infra", "bench", "serve", f"--base-url={server.url}/v1",
             f"--trace={trace}", f"--vocab-size={vocab_size}", f"--json={callers}"],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        recorder.terminate()
        recorder.wait(30)
    fleet, jobs = read_recording(out)
    return fleet, jobs[4:], json.loads(callers.read_text())  # without those that warm up


def _cells(found: dict[str, tuple[float, float]]) -> list[str]:
    cells = []
    for name, (real, simulated) in found.items():
        if name == "refused":
            cells.append(f"{real:.1%} / {simulated:.1%}")
        elif name == "output_tokens_per_s":
            cells.append(f"{real:.0f} / {simulated:.0f} ({simulated / real - 1:+.0%})")
        else:
            error = simulated / real - 1
            cells.append(f"{1000 * real:.0f} / {1000 * simulated:.0f} ms ({error:+.0%})")
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, help="of each run")
    parser.add_argument("--model", action="append", choices=_SECONDS)
    parser.add_argument("--workers", action="append", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, results = [_HEADING], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, workers in itertools.product(
            options.model or _SECONDS, options.workers or (1, 2)
        ):
            where: list[str] = []
            vocab_size = 256
            seconds = options.seconds or _SECONDS[model]
            if model != "demo":
                path = folder / model
                if not path.exists():
                    make_model(model, path)
                where = [f"--model={path}", f"--served-model-name={model}"]
            arguments = [*where, f"--workers={workers}"]
            low, middle, high = (rate * workers for rate in _RATES[model, workers])
            trace = folder / "fit.csv"
            write_trace(trace, middle, seconds, "fit")
            fleet, jobs, _ = record(arguments, trace, folder / "fit.jsonl", vocab_size)
            costs = fit_costs(fleet, jobs)
            print(model, workers, costs, file=sys.stderr, flush=True)
            for rate, strategy in itertools.product((low, high), _STRATEGIES):
                write_trace(trace, rate, seconds, f"{model} {rate}")
                out = folder / "run.jsonl"
                chosen = [*arguments, f"--strategy={strategy}"]
                _, jobs, callers = record(chosen, trace, out, vocab_size)
                options_ = EngineOptions(model_path="", strategy=_STRATEGIES[strategy])
                simulated = simulate(fleet_with(costs, options_, workers), read_arrivals(trace))
                real = outcome_of(jobs)
                num_refused = int(rate * options.seconds) - len(jobs)
                real.num_arrivals += num_refused
                real.refusals = Counter({"any": num_refused})
                found = compared(real, simulated)
                found["refused"] = tuple(
                    each.as_dict()["refused_share"] for each in (real, simulated)
                )
                load = "low" if rate == low else "high"
                rows.append((model, str(workers), strategy, load, *_cells(found)))
                results.append(
                    {"model": model, "workers": workers, "strategy": strategy, "rate": rate,
                     "figures": found, "callers": callers}
                )  # fmt: skip
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print(markdown_table(rows))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
