"""Recorded steps: one graph per padded number of rows and bound of contexts.

Graphs are recorded one at a time between steps, so that a cold worker serves at once; the largest
first, so that smaller ones reuse its memory.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from workers.engine.model import ModelRefused

log = logging.getLogger("batchway.engine")

STEPS = ("auto", "direct", "ahead", "graphs")
_SIZES: tuple[int, ...] = (1, 2, 4, *range(8, 257, 8))
_BEYOND = 32


def padded_size(num_rows: int) -> int:
    """1, 2, 4, 8, 16, 24 … 256, then by 32."""
    if num_rows > _SIZES[-1]:
        return -(-num_rows // _BEYOND) * _BEYOND
    return next(size for size in _SIZES if size >= num_rows)


def sizes_up_to(num_rows: int) -> list[int]:
    """All padded sizes up to the one for `num_rows`, ascending."""
    largest = padded_size(num_rows)
    return [s for s in _SIZES if s <= largest] + list(range(_SIZES[-1] + _BEYOND, largest + 1, 32))


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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            compute()
        return graph


def check_steps(steps: str, device: torch.device) -> None:
    """Raises ModelRefused if this way to run steps is unknown or unavailable."""
    if steps not in STEPS:
        raise ModelRefused(f"steps {steps} is not one of {', '.join(STEPS)}")
    if steps == "graphs" and device.type != "cuda":
        raise ModelRefused("steps graphs needs a CUDA device")


def recorder(steps: str) -> Record | None:
    """The recorder for `steps`; None if steps are not recorded."""
    return CudaRecorder() if steps == "graphs" else None


class StepGraphs:
    """Finds the graph for a step, and records missing ones.

    `compute(size, bound)` computes `size` rows with contexts of up to `bound` units, on fixed
    tensors; `warm_up` does the same without side effects.
    """

    def __init__(
        self,
        record: Record,
        compute: Callable[[int, int], None],
        warm_up: Callable[[int, int], None],
        max_rows: int,
    ) -> None:
        self._record = record
        self._compute = compute
        self._warm_up = warm_up
        self._sizes = sizes_up_to(max_rows)
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._bounds: set[int] = set()
        self._is_off = False

    @property
    def num_sizes(self) -> int:
        """Number of graphs per bound when all are recorded."""
        return len(self._sizes)

    @property
    def recorded(self) -> list[tuple[int, int]]:
        """(size, bound) of each graph, in recording order."""
        return list(self._graphs)

    def run(self, num_rows: int, num_units: int) -> int:
        """Computes a step, by a graph if there is one; returns its padded number of rows."""
        size, bound = padded_size(num_rows), _power_of_two(num_units)
        self._bounds.add(bound)
        key = self._find(size, bound)
        if key is None:
            self._compute(size, bound)
            return size
        self._graphs[key].replay()
        return key[0]

    def replay(self, key: tuple[int, int]) -> None:
        """Computes a step by this graph, one of `recorded`."""
        self._graphs[key].replay()

    def record_all(self, bound: int) -> None:
        """Records all sizes for contexts of up to `bound` units."""
        self._bounds.add(bound)
        while self.record_next():
            pass

    def record_next(self) -> bool:
        """Records the largest missing size, for the bounds used so far. Returns whether it did."""
        if self._is_off:
            return False
        missing = [
            (size, bound)
            for bound in self._bounds
            for size in self._sizes
            if (size, bound) not in self._graphs
        ]
        if not missing:
            return False
        size, bound = max(missing)
        try:
            self._warm_up(size, bound)
            self._graphs[size, bound] = self._record(lambda: self._compute(size, bound))
        except RuntimeError as exc:
            # Most likely the model waits for the device somewhere.
            self._is_off = True
            log.warning("steps are not recorded: %s", type(exc).__name__)
        return not self._is_off

    def _find(self, size: int, bound: int) -> tuple[int, int] | None:
        """The smallest graph that holds the step without computing more than twice its rows."""
        fitting = [key for key in self._graphs if size <= key[0] <= 2 * size and bound <= key[1]]
        return min(fitting, default=None)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
