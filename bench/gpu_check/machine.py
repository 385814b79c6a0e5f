"""`python -m bench.gpu_check.machine --folder MODEL [--device cpu] [--tiny]`: measures the device,
chooses the sizes of all stages, and makes the model.

Writes figures to standard output as they come, a JSON object a line, for `Record.put`. Exit status
0: it ran to its end; 2: there is no GPU.
"""

import argparse
import faulthandler
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.gpu_check.record import NO_GPU
from bench.models import SHAPES, TINY, Shape, save_model
from workers.profiling import measure

_WEIGHT_SHARE = 0.3  # of the free memory at most: many streams' KV takes more than the weights
_USED_SHARE = 0.85  # of the free memory, by weights and the KV of the most streams


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    faulthandler.enable()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here; nothing was checked", file=sys.stderr)
        return NO_GPU
    is_cuda = options.device == "cuda"
    device = torch.device(options.device)
    dtype = torch.bfloat16 if is_cuda else torch.float32
    name, free_bytes = platform.machine(), 0
    streams, num_in, num_out, shape = (1, 4, 8), 6, 3000, TINY
    if is_cuda:
        name, free_bytes = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    _emit(about={"device": name, "cuda": str(torch.version.cuda), **versions})
    if not options.tiny:
        streams, num_in, shape = (1, 32, 256), 128, shape_for(free_bytes)
        num_out = output_tokens(shape, free_bytes, max(streams), num_in)
        _emit(roofs=asdict(measure(device, dtype)))
    save_model(shape, device, dtype, options.folder)
    _emit(model=asdict(shape), streams=streams, num_in=num_in, num_out=num_out)
    return 0


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


def _emit(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    sys.exit(main())
