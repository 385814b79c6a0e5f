"""Measures this machine's limits: bytes read and operations per second."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_READ_BYTES = 256 * 2**20  # larger than any cache
_GPU_READ_BYTES = 2 * 2**30
_COLUMNS = 8192
_GEMM_SIZE = 2048
_GPU_GEMM_SIZE = 8192
_TIMES = 7  # the shortest is used


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits of one device for one element type."""

    device: str
    dtype: str
    num_threads: int
    bytes_per_s: float  # of a matrix-vector product
    flops_per_s: float  # of a square matrix product, 2 per multiplication


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measures with the current number of threads; takes some seconds. Numbers are random: a GPU is
    faster on equal ones than on weights."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Machine(
        name,
        str(dtype).removeprefix("torch."),
        torch.get_num_threads(),
        _bytes_per_s(device, dtype),
        _flops_per_s(device, dtype),
    )


def _bytes_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """The faster of a matrix-vector product and a copy, as products are slow on some processors.
    On a CPU, measure bandwidth in float32; half precision is compute-bound."""
    if device.type == "cpu":
        dtype = torch.float32
    num_bytes = _GPU_READ_BYTES if device.type == "cuda" else _READ_BYTES
    num_rows = num_bytes // (_COLUMNS * dtype.itemsize)
    matrix = torch.randn(num_rows, _COLUMNS, device=device, dtype=dtype)
    vector = torch.randn(_COLUMNS, device=device, dtype=dtype)
    read_s = _best_s(lambda: torch.mv(matrix, vector), device)
    copy_s = _best_s(matrix.clone, device)
    return max(matrix.nbytes / read_s, 2 * matrix.nbytes / copy_s)


def _flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    size = _GPU_GEMM_SIZE if device.type == "cuda" else _GEMM_SIZE
    square = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _best_s(lambda: square @ square, device)


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    with torch.inference_mode():
        work()
        for _ in range(_TIMES):
            synchronize(device)
            started_s = time.perf_counter()
            work()
            synchronize(device)
            best = min(best, time.perf_counter() - started_s)
    return best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
