"""A fleet's models alone and all at once: `python -m bench.fleet --folder DIR`.

Several models of size S behind one `batchway up`, each with a load of its own. Prints what each
load takes alone, their sum, and what all take together.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench.models import SIZES, make_model
from bench.processes import Server, running_batchway
from infra.measure.load import Caller, Load, run_load
from infra.measure.workloads import Workload, WorkloadRequest, log_uniform_workload
from infra.tables import markdown_table

_SIZE = "S"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for models and the fleet file")
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--requests", type=int, default=64, help="of each model, 16 at a time")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(arguments)
    names = [f"m{number}" for number in range(options.models)]
    path = _prepare(options.folder, names)
    with running_batchway([f"--fleet={path}"]) as server:
        rows = asyncio.run(_measure(server, names, options))
    print(markdown_table(rows))
    return 0


def _prepare(folder: Path, names: Sequence[str]) -> Path:
    """Writes the models and their fleet.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["models:"]
    for seed, name in enumerate(names):
        if not (folder / name / "config.json").exists():
            make_model(_SIZE, folder / name, seed=seed)
        lines.append(f"  - {{model: {folder / name}, served_model_name: {name}}}")
    path = folder / "fleet.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


async def _measure(
    server: Server, names: Sequence[str], options: argparse.Namespace
) -> list[list[str]]:
    """Measures each model alone and all together in each run; the first run is not counted."""
    rows = [["run", *(f"{name} alone, s" for name in names), "sum, s", "together, s", "ratio"]]
    ratios = []
    async with server.client() as client:
        for run in range(options.runs + 1):
            num_requests = options.requests if run else 4
            loads = {name: _draw(num_requests, f"{name} {run}") for name in names}
            alone_s = [await _take(client, {name: load}) for name, load in loads.items()]
            together_s = await _take(client, {n: _reversed(load) for n, load in loads.items()})
            if run:
                ratios.append(together_s / sum(alone_s))
                times_s = (*alone_s, sum(alone_s), together_s)
                rows.append([f"{run}", *(f"{t:.1f}" for t in times_s), f"{ratios[-1]:.2f}"])
    rows.append(["median", *("" for _ in names), "", "", f"{statistics.median(ratios):.2f}"])
    return rows


async def _take(client: httpx.AsyncClient, workloads: dict[str, Workload]) -> float:
    """Returns the seconds until the loads of these models have ended, sent at the same time."""
    runs = await asyncio.gather(
        *(
            run_load(Caller(client, name), Load(workload, is_open=False, max_concurrency=16))
            for name, workload in workloads.items()
        )
    )
    for run in runs:
        run.raise_failures()
    return max(run.wall_s for run in runs)


def _reversed(workload: Workload) -> Workload:
    """Returns the same lengths with prompts that no prefix cache knows."""
    return Workload(
        tuple(WorkloadRequest(r.prompt_token_ids[::-1], r.max_tokens) for r in workload.requests)
    )


def _draw(num_requests: int, seed: str) -> Workload:
    return log_uniform_workload(num_requests, SIZES[_SIZE]["vocab_size"], seed=seed)


if __name__ == "__main__":
    sys.exit(main())
