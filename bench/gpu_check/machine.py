"""The device, and its measured bandwidth and compute rate."""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import triton

_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Machine:
    """The device to check. `is_tiny`: run everything at sizes that are fast on a CPU."""

    device: torch.device
    is_tiny: bool

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_cuda else torch.float32

    def about(self) -> dict[str, str]:
        name = torch.cuda.get_device_name(self.device) if self.is_cuda else platform.machine()
        return {
            "device": name,
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "triton": triton.__version__,
            "transformers": transformers.__version__,
        }

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0] if self.is_cuda else 0

    def roofs(self) -> dict[str, float]:
        """Measures bytes per second read and written by a copy, and operations per second of a
        matrix product, on random data: zeros are faster than real weights."""
        num_bytes, side = (2**20, 256) if self.is_tiny else (2 * 2**30, 8192)
        source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy_s = self._seconds(lambda: target.copy_(source))
        a, b = torch.randn(2, side, side, device=self.device).to(self.dtype)
        product_s = self._seconds(lambda: a @ b)
        return {"bytes_per_s": 2 * num_bytes / copy_s, "flops": 2 * side**3 / product_s}

    def _seconds(self, compute: Callable[[], Any]) -> float:
        """Seconds per call on the device: several in a row, after a warm-up."""
        compute()
        self._wait()
        start_s = time.perf_counter()
        for _ in range(_REPEATS):
            compute()
        self._wait()
        return (time.perf_counter() - start_s) / _REPEATS

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
