"""What each stage measures, most important first."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu_check.checks import kernel_checks
from bench.gpu_check.comparison import Transformers
from bench.gpu_check.decoding import (
    check_graphs,
    time_closed,
    time_host_gap,
    time_prefill,
    time_streams,
    warm_up,
)
from bench.gpu_check.device_profile import profile_steps
from bench.gpu_check.machine import Machine, measure_roofs
from bench.gpu_check.over_http import measure_http
from bench.gpu_check.results import Results
from bench.gpu_check.sampling import KINDS, time_sampling
from bench.gpu_check.sanitizer import check_memory
from bench.gpu_check.served import Served, at_once, serve
from bench.gpu_check.shapes import Shape
from bench.gpu_check.sizes import Sizes
from bench.gpu_check.strategies import STRATEGIES, time_strategy
from infra.measure.engine import run_workload


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage works with; `folder` holds the files of all stages."""

    machine: Machine
    sizes: Sizes
    results: Results
    folder: Path

    def repeat(self, group: str, name: str, compute: Callable[[int], object]) -> None:
        """Measures several times; `compute` gets the number of the repeat as its seed."""
        for number in range(self.sizes.num_repeats):
            self.results.measure(group, name, partial(compute, number + 1))


def _kernels(stage: Stage) -> None:
    roofs = measure_roofs(stage.machine)
    stage.results.put("roofs", dataclasses.asdict(roofs))
    for name, check in kernel_checks(stage.machine):
        stage.results.check(name, check)


def _decoding(stage: Stage) -> None:
    """Measures the shape that is compared with other engines, by the default path."""
    sizes, results = stage.sizes, stage.results
    served = _serve(stage, sizes.decoding)
    if stage.machine.device.type == "cuda":
        results.check("CUDA graphs", partial(check_graphs, served))
    checked = run_workload(served.engine(), at_once(served.shape, sizes.checked, seed=0))
    results.put("checked", [timeline.token_ids for timeline in checked.timelines])
    results.measure("warm-up", "seconds", partial(warm_up, served, sizes))
    # Works in rounds, so that each count of streams soon has a figure.
    for number in range(sizes.num_repeats):
        for n in sizes.streams:
            results.measure("decoding", str(n), partial(time_streams, served, sizes, n, number + 1))
        if number == 0:
            stage.repeat("prefill", "prompts", partial(time_prefill, served, sizes))
            for n in sizes.streams:
                results.measure("host gap", str(n), partial(time_host_gap, served, sizes, n))
    for n in sizes.streams:
        results.measure("profile", str(n), partial(profile_steps, served, sizes, n))
    for kind in KINDS:
        results.measure("sampling", kind, partial(time_sampling, served, sizes, kind))
    stage.repeat("closed", "ours", partial(time_closed, served, sizes))


def _http(stage: Stage) -> None:
    results = stage.results
    results.put("shape", stage.sizes.decoding.name)
    results.put("num_in", stage.sizes.num_in)
    results.put("num_out", stage.sizes.num_out)
    measure_http(stage.machine, stage.sizes, results)


def _strategies(stage: Stage) -> None:
    sizes, results = stage.sizes, stage.results
    served = _serve(stage, sizes.strategies)
    results.measure("warm-up", "seconds", partial(warm_up, served, sizes))
    for number in range(sizes.num_repeats):
        for name in STRATEGIES:
            timed = partial(time_strategy, served, sizes, name, number + 1)
            results.measure("strategies", name, timed)


def _transformers(stage: Stage) -> None:
    """Measures transformers with the device to itself: two such models do not fit."""
    sizes, results = stage.sizes, stage.results
    model = Transformers(sizes.decoding, stage.machine)
    if outputs := _figure(stage.folder, "decoding", "checked"):
        prompts = [r.prompt_token_ids for r in at_once(sizes.decoding, sizes.checked, 0).requests]
        results.check("engine's tokens", lambda: model.check(prompts, outputs))
    if killed := _figure(stage.folder, "http", "killed tokens"):
        n = sizes.checked[0]
        prompts = _figure(stage.folder, "http", "killed prompts")[:n]
        results.check("tokens around the kill", lambda: model.check(prompts, killed[:n]))
    # Its first run is not counted: it compiles and records.
    for number in range(sizes.num_repeats + 1):
        group = "closed" if number else "warm-up"
        results.measure(group, "transformers", partial(model.tokens_per_s, sizes.closed, number))
    model.close()


def _sanitizer(stage: Stage) -> None:
    check_memory(stage.results, has_gpu=stage.machine.device.type == "cuda")


def _serve(stage: Stage, shape: Shape) -> Served:
    results = stage.results
    served = serve(shape, stage.machine, results.note)
    results.put("shape", shape.name)
    results.put("num_in", stage.sizes.num_in)
    results.put("num_out", stage.sizes.num_out)
    results.put("model", type(served.model).__name__)
    return served


def _figure(folder: Path, stage: str, name: str) -> Any:
    """A figure of an earlier stage; None if it has none."""
    path = folder / f"{stage}.json"
    return json.loads(path.read_text()).get(name) if path.exists() else None


PLAN: dict[str, Callable[[Stage], None]] = {
    "kernels": _kernels,
    "decoding": _decoding,
    "http": _http,
    "transformers": _transformers,
    "strategies": _strategies,
    "sanitizer": _sanitizer,
}
