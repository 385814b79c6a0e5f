"""`python -m bench.gpu_check.machine --folder MODEL [--device cpu] [--tiny]`: measures the device,
chooses the sizes of all stages, and makes the models: of text, and beside it of embeddings.

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

from bench.gpu_check.record import NO_GPU, embedder_of
from bench.models import SHAPES, TINY, Shape, save_embedder, save_model
from workers.profiling import measure

# Of the free memory at most: by the weights of each of three servers that run beside each other, as
# many streams' KV takes more; by their weights and the KV of two.
_WEIGHT_SHARE = 0.12
_USED_SHARE = 0.75
_KV_SHARE = 0.25  # by the KV of one


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
    streams: tuple[int, ...] = (1, 4, 8)
    num_in, num_out, shape = 6, 600, TINY
    if is_cuda:
        name, free_bytes = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    _emit(about={"device": name, "cuda": str(torch.version.cuda), **versions})
    if not options.tiny:
        streams, num_in, shape = (1, 32, 256, 512), 128, shape_for(free_bytes)
        num_out = output_tokens(shape, free_bytes, max(streams), num_in)
        kv_bytes = max(streams) * (num_in + num_out) * 2 * shape.num_kv()
        _emit(kv_bytes=min(kv_bytes, int(_KV_SHARE * free_bytes)))
        _emit(roofs=asdict(measure(device, dtype)))
    save_model(shape, device, dtype, options.folder)
    smallest = TINY if options.tiny else SHAPES[0]
    save_embedder(smallest, device, dtype, embedder_of(options.folder))
    _emit(model=asdict(shape), streams=streams, num_in=num_in, num_out=num_out)
    return 0


def shape_for(free_bytes: int, itemsize: int = 2) -> Shape:
    """Returns the largest shape whose weights take no more than their share, else the smallest."""
    fit = [s for s in SHAPES if s.num_weights() * itemsize <= _WEIGHT_SHARE * free_bytes]
    return fit[-1] if fit else SHAPES[0]


def output_tokens(shape: Shape, free_bytes: int, num_streams: int, num_in: int) -> int:
    """Returns the output tokens of each stream, 128 to 512, with which the KV of all streams
    fits."""
    left = _USED_SHARE * free_bytes - 3 * 2 * shape.num_weights()
    num_tokens = int(left / 2 / (num_streams * 2 * shape.num_kv())) - num_in
    return max(128, min(512, num_tokens // 128 * 128))


def _emit(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    sys.exit(main())
