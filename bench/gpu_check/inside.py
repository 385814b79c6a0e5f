"""`python -m bench.gpu_check.inside STAGE [--folder MODEL] [--device cpu] [--tiny]`: a stage that
uses the device in this process.

Writes figures to standard output as they come, a JSON object a line, for `Record.put`. Exit status
0: it ran to its end, whatever it found; 2: there is no GPU.
"""

import argparse
import faulthandler
import json
import logging
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
import triton

from bench.gpu_check.checks import Machine, engine_checks, kernel_checks
from bench.gpu_check.record import NO_GPU, Finding
from bench.models import SHAPES, TINY, Shape, save_model
from workers.profiling import measure

_WEIGHT_SHARE = 0.3  # of the free memory at most: many streams' KV takes more than the weights
_USED_SHARE = 0.85  # of the free memory, by weights and the KV of the most streams


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=_STAGES)
    parser.add_argument("--folder", type=Path, help="of the model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
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
    device, free_bytes = platform.machine(), 0
    streams, num_in, num_out, shape = (1, 4, 8), 6, 3000, TINY
    if machine.is_cuda:
        device, free_bytes = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
    versions = {module.__name__: module.__version__ for module in (torch, triton, transformers)}
    _emit(about={"device": device, "cuda": str(torch.version.cuda), **versions})
    if not machine.is_tiny:
        streams, num_in, shape = (1, 32, 256), 128, shape_for(free_bytes)
        num_out = output_tokens(shape, free_bytes, max(streams), num_in)
        _emit(roofs=asdict(measure(machine.device, machine.dtype)))
    save_model(shape, machine.device, machine.dtype, folder)
    _emit(model=asdict(shape), streams=streams, num_in=num_in, num_out=num_out)


def shape_for(free_bytes: int, itemsize: int = 2) -> Shape:
    """Returns the largest shape whose weights take no more than their share, else the smallest."""
    fit = [s for s in SHAPES if s.num_weights() * itemsize <= _WEIGHT_SHARE * free_bytes]
    return fit[-1] if fit else SHAPES[0]


def output_tokens(shape: Shape, free_bytes: int, num_streams: int, num_in: int) -> int:
    """Returns the output tokens of each stream, 256 to 1024, with which the KV of all streams
    fits."""
    left = _USED_SHARE * free_bytes - 2 * shape.num_weights()
    num_tokens = int(left / (num_streams * 2 * shape.num_kv())) - num_in
    return max(256, min(1024, num_tokens // 128 * 128))


def check_kernels(machine: Machine, folder: Path | None = None) -> None:
    """Checks each kernel; an exception counts as failure and does not stop the others."""
    for name, compare in kernel_checks(machine):
        try:
            finding = compare()
        except Exception as exc:  # a kernel's compiler may raise anything
            finding = Finding(False, f"{type(exc).__name__}: {exc}".partition("\n")[0])
        _emit(checks=[{"name": name, **asdict(finding)}])


def _self_test(machine: Machine, folder: Path) -> None:
    check_kernels(machine)
    for name, finding in engine_checks(machine):
        _emit(checks=[{"name": name, **asdict(finding)}])


def _emit(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


_STAGES: dict[str, Callable[[Machine, Path], None]] = {
    "machine": _machine,
    "kernels": check_kernels,
    "self-test": _self_test,
}

if __name__ == "__main__":
    sys.exit(main())
