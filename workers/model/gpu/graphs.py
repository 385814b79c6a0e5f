"""Recorded steps: one graph per padded number of tokens.

All are recorded at load, the largest first, so that smaller ones reuse its memory. A graph works
for contexts of any length: its kernels read on the device how much they have to do.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import torch

_SIZES: tuple[int, ...] = (1, 2, 4, *range(8, 257, 8))
_BEYOND = 32
# Limit of recorded steps with prompts. It does not follow the token budget, which may change. For
# more tokens the device takes longer than the host's launches.
_MOST_TOKENS = 512
_TOKENS_APART = 64


def padded_size(num_rows: int) -> int:
    """Rounds up to 1, 2, 4, 8, 16, 24 … 256, then to multiples of 32."""
    if num_rows > _SIZES[-1]:
        return -(-num_rows // _BEYOND) * _BEYOND
    return next(size for size in _SIZES if size >= num_rows)


def sizes_up_to(num_rows: int) -> list[int]:
    """Returns all padded sizes up to the one for `num_rows`, ascending; then those of steps with
    prompts."""
    largest = padded_size(num_rows)
    of_rows = [s for s in _SIZES if s <= largest]
    of_rows += range(_SIZES[-1] + _BEYOND, largest + 1, _BEYOND)
    first = (largest // _TOKENS_APART + 1) * _TOKENS_APART
    return [*of_rows, *range(first, _MOST_TOKENS + 1, _TOKENS_APART)]


class Graph(Protocol):
    """A recorded computation on tensors at fixed addresses."""

    def replay(self) -> None: ...


Compute = Callable[[], None]
Record = Callable[[Compute], Graph]


class CudaRecorder:
    """Records CUDA graphs that share a memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Graph:
        """Records a computation. Raises what `compute` raises, or what cannot be recorded."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                compute()
        except RuntimeError as exc:
            # The end of a broken recording raises too, and would hide the reason.
            raise exc.__context__ or exc from None
        finally:
            torch.cuda.set_stream(stream)  # torch stays on its own if the end raises
        return graph


def recorder(device: torch.device) -> Record | None:
    """What records steps on this device; None if nothing does."""
    return CudaRecorder() if device.type == "cuda" else None


class StepGraphs:
    """The graphs of these sizes. `compute(size)` computes that many tokens on fixed tensors."""

    def __init__(self, record: Record, compute: Callable[[int], None], sizes: Seq[int]) -> None:
        self._record = record
        self._compute = compute
        self._sizes = sizes
        self._graphs: dict[int, Graph] = {}

    @property
    def sizes(self) -> list[int]:
        """The sizes of the recorded graphs, in recording order."""
        return list(self._graphs)

    def record_all(self) -> None:
        """Records; the device's next step must be padding. Raises what a recording raises."""
        for size in reversed(self._sizes):
            self._compute(size)  # compiles its kernels
            self._graphs[size] = self._record(lambda size=size: self._compute(size))  # type: ignore[misc]

    def replay(self, size: int) -> None:
        """Computes a step of this padded size."""
        self._graphs[size].replay()
