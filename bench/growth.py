"""Measures step time by batch and context: python -m bench.growth --model DIR

Each stream gets one token per step. The result is compared with this machine's limit: bytes to read
over measured bandwidth, or operations over the measured product rate, whichever is longer. Uses the
model runner alone (bench.scheduler measures the engine's bookkeeping). The context's KV is random.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch

from contract.jobs import SamplingParams
from infra.profile_command import limits_line
from infra.tables import markdown_table, write
from workers.engine.interface import Chunk, ModelRefused, Sample
from workers.engine.sequence import Sequence
from workers.ipc.messages import EngineOptions
from workers.model.loader import load_model
from workers.model.runner import ModelRunner
from workers.profiling.demand import Demand, Shape, demand_of, shape_of
from workers.profiling.machine import Machine, measure, synchronize

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 8192)
_NUM_WARM_UP = 2  # steps
_LEAST_STEPS, _MOST_STEPS = 3, 15
_ENOUGH_S = 0.8  # of timed steps
_TILE_BLOCKS = 64  # of random KV, repeated


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch and context. Seconds; step_s is a median."""

    num_streams: int
    context: int
    step_s: float
    memory_s: float  # lower bound of reading
    compute_s: float  # lower bound of computing

    @property
    def limit_s(self) -> float:
        return max(self.memory_s, self.compute_s)

    @property
    def share(self) -> float:
        """The limit's share of the step; at most 1."""
        return self.limit_s / self.step_s


@dataclass(frozen=True, slots=True)
class Growth:
    """All cells of a model whose KV fits."""

    machine: Machine
    shape: Shape
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    cells: tuple[Cell, ...]

    def as_dict(self) -> dict[str, Any]:
        cells = [asdict(c) | {"limit_s": c.limit_s, "share": c.share} for c in self.cells]
        return asdict(self) | {"cells": cells}

    def table(self) -> str:
        """Formats a row per batch and a column per context: step / limit in ms and the share; `b`
        if bytes are the limit, `o` if operations are."""
        found = {(cell.num_streams, cell.context): cell for cell in self.cells}
        rows = [["streams", *(f"context {n:,}" for n in self.contexts)]]
        for batch in self.batches:
            cells = (_shown(found.get((batch, context))) for context in self.contexts)
            rows.append([str(batch), *cells])
        return markdown_table(rows)


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "does not fit"
    kind = "b" if cell.memory_s >= cell.compute_s else "o"
    return f"{1000 * cell.step_s:.1f} / {1000 * cell.limit_s:.1f} {kind}, {cell.share:.0%}"


def measure_growth(options: EngineOptions, batches: Seq[int], contexts: Seq[int]) -> Growth:
    """Measures all cells. Raises ModelRefused."""
    options = msgspec.structs.replace(options, ahead=False)
    runner = load_model(options, lambda text: print(text, file=sys.stderr)).model
    if not isinstance(runner, ModelRunner):
        raise ModelRefused("only models with paged attention are measured")
    keys = next(iter(runner.cache.layers.values())).keys
    machine, shape = measure(keys.device, keys.dtype), shape_of(runner)
    cells = []
    for context in contexts:
        for batch in batches:
            streams = make_streams(runner, batch, context)
            if streams is not None:
                fill_cache(runner, num_blocks=sum(len(s.block_ids) for s in streams))
                cells.append(time_cell(runner, shape, machine, streams, context))
    return Growth(machine, shape, tuple(batches), tuple(contexts), tuple(cells))


def make_streams(runner: ModelRunner, num_streams: int, context: int) -> list[Sequence] | None:
    """Returns streams with `context` tokens, all but the last computed; None if they do not fit."""
    most = context + _NUM_WARM_UP + _MOST_STEPS
    num_blocks = -(-most // runner.block_size)
    if num_streams * num_blocks > runner.num_blocks or most > runner.max_model_len:
        return None
    return [
        Sequence(
            job_id=str(number),
            epoch=1,
            choice=0,
            tenant="",
            lane="",
            token_ids=[4 + (7919 * number + 31 * i) % 200 for i in range(context)],
            num_prompt=context - 1,
            params=SamplingParams(max_tokens=most, seed=number, temperature=0.0, ignore_eos=True),
            num_computed=context - 1,
            block_ids=list(range(number * num_blocks, (number + 1) * num_blocks)),
        )
        for number in range(num_streams)
    ]


def fill_cache(runner: ModelRunner, num_blocks: int) -> None:
    """Fills the first blocks with random KV: reading untouched pages costs nothing."""
    for layer in runner.cache.layers.values():
        for tensor in (layer.keys, layer.values):
            tile = torch.randn(_TILE_BLOCKS, *tensor.shape[1:]).to(tensor)
            for first in range(0, num_blocks, _TILE_BLOCKS):
                part = tensor[first : min(first + _TILE_BLOCKS, num_blocks)]
                part.copy_(tile[: len(part)])


def time_cell(
    runner: ModelRunner, shape: Shape, machine: Machine, streams: list[Sequence], context: int
) -> Cell:
    """Returns the median of some steps, each one token further."""
    device = next(iter(runner.cache.layers.values())).keys.device
    walls_s: list[float] = []
    demands: list[Demand] = []
    for number in range(_NUM_WARM_UP + _MOST_STEPS):
        chunks = [Chunk(s, s.num_computed, 1, samples=True) for s in streams]
        start_s = time.perf_counter()
        rows = runner.run(chunks)
        synchronize(device)
        wall_s = time.perf_counter() - start_s
        for stream, row in zip(streams, rows, strict=True):
            assert isinstance(row, Sample)
            stream.token_ids.append(row.token_id)
            stream.num_computed += 1
        if number < _NUM_WARM_UP:
            continue
        walls_s.append(wall_s)
        demands.append(demand_of(shape, chunks))
        if len(walls_s) >= _LEAST_STEPS and sum(walls_s) >= _ENOUGH_S:
            break
    return Cell(
        len(streams),
        context,
        statistics.median(walls_s),
        statistics.median(d.num_bytes for d in demands) / machine.bytes_per_s,
        statistics.median(d.flops for d in demands) / machine.flops_per_s,
    )


def main(argv: Seq[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--quantization", default="none", choices=("none", "int8"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--threads", type=int, help="of the model (default: all cores)")
    parser.add_argument("--kv-gib", type=float, default=4.0, help="memory for KV (default: 4)")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES, metavar="N")
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS, metavar="TOKENS")
    parser.add_argument("--json", metavar="OUT")
    given = parser.parse_args(argv)
    options = EngineOptions(
        model_path=given.model,
        dtype=given.dtype,
        quantization=given.quantization,
        device=given.device,
        num_threads=given.threads,
        kv_memory_bytes=int(given.kv_gib * 2**30),
        max_num_seqs=max(given.batch),
    )
    try:
        growth = measure_growth(options, given.batch, given.context)
    except ModelRefused as exc:
        print(f"bench.growth: {exc}", file=sys.stderr)
        return 1
    text = f"{limits_line(growth.machine, growth.shape)}\n\n{growth.table()}"
    write(growth.as_dict(), text, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
