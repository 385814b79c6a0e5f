"""`python -m bench.gpu_check.inside STAGE [--folder MODEL] [--device cpu] [--tiny]`: a stage that
uses the device in this process.

Writes figures to standard output as they come, a JSON object a line, for `Record.put`. Exit status
0: it ran to its end, whatever it found; 2: there is no GPU.
"""

import argparse
import dataclasses
import faulthandler
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.gpu_check.checks import kernel_checks
from bench.gpu_check.machine import Machine
from bench.gpu_check.model import TINY, output_tokens, save_model, shape_for
from bench.gpu_check.record import Finding
from bench.gpu_check.reference import check_engine
from infra.measure.engine import EngineRun, run_workload
from infra.measure.workloads import log_uniform_workload
from infra.tables import percentile
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions, StrategyName, StrategyOptions
from workers.model.loader import load_model

NO_GPU = 2
_STRATEGIES: tuple[StrategyName, ...] = ("continuous", "dynamic", "static")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=_STAGES)
    parser.add_argument("--folder", type=Path, help="of the model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(argv)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here; nothing was checked", file=sys.stderr)
        return NO_GPU
    # cuDNN's attention builds a graph for each length of a context.
    torch.backends.cuda.enable_cudnn_sdp(False)
    _STAGES[options.stage](Machine(torch.device(options.device), options.tiny), options.folder)
    return 0


def _machine(machine: Machine, folder: Path) -> None:
    """Measures the device, chooses the sizes of all stages, and makes the model."""
    _emit(about=machine.about())
    free_bytes = machine.free_bytes()
    streams, num_in, num_out, shape = (1, 4, 8), 6, 3000, TINY
    if not machine.is_tiny:
        streams, num_in, shape = (1, 32, 256), 128, shape_for(free_bytes)
        num_out = output_tokens(shape, free_bytes, max(streams), num_in)
    _emit(roofs=machine.roofs())
    save_model(shape, machine, folder)
    _emit(model=dataclasses.asdict(shape), streams=streams, num_in=num_in, num_out=num_out)


def check_kernels(machine: Machine, folder: Path | None = None) -> None:
    """Checks each kernel; an exception counts as failure and does not stop the others."""
    for name, compare in kernel_checks(machine):
        try:
            finding = compare()
        except Exception as exc:  # a kernel's compiler may raise anything
            finding = Finding(False, f"{type(exc).__name__}: {exc}".partition("\n")[0])
        _check(name, finding)


def _self_test(machine: Machine, folder: Path) -> None:
    check_kernels(machine)
    check_engine(machine, _say, _check)


def _strategies(machine: Machine, folder: Path) -> None:
    """Times the strategies on one workload, all requests at once. Static and dynamic batches are
    padded, as is common."""
    num_requests, batch_size, lengths = (6, 2, (2, 8)) if machine.is_tiny else (128, 32, (16, 512))
    options = EngineOptions(
        model_path=str(folder),
        device=machine.device.type,
        kv_memory_bytes=None if machine.is_cuda else 2**22,
        max_model_len=1024,
    )
    loaded = load_model(options, _say)

    def run(name: StrategyName, num: int) -> EngineRun:
        padded = name != "continuous"
        strategy = StrategyOptions(name=name, batch_size=batch_size, padded=padded)
        chosen = msgspec.structs.replace(options, strategy=strategy)
        engine = build_engine(loaded.model, loaded.vocab_size, chosen, loaded.num_step_tokens)
        workload = log_uniform_workload(
            num, loaded.vocab_size, prompt_tokens=lengths, output_tokens=lengths, seed=num
        )
        return run_workload(engine, workload)

    run("continuous", batch_size)  # not counted: it compiles
    for name in _STRATEGIES:
        found = run(name, num_requests)
        rate, e2e_s = found.output_tokens_per_s, [t.e2e_s for t in found.timelines]
        shown = {"tokens_per_s": rate, "steps": found.num_steps, "p99_s": percentile(e2e_s, 0.99)}
        _emit(strategies={name: shown})


def _check(name: str, finding: Finding) -> None:
    _emit(checks=[{"name": name, **dataclasses.asdict(finding)}])


def _emit(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_STAGES: dict[str, Callable[[Machine, Path], None]] = {
    "machine": _machine,
    "kernels": check_kernels,
    "self-test": _self_test,
    "strategies": _strategies,
}

if __name__ == "__main__":
    sys.exit(main())
