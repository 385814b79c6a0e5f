"""The device, its timer, and its measured bandwidth and compute rate."""

import gc
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Machine:
    """The device to check. `is_tiny`: run everything at sizes that are fast on a CPU."""

    device: torch.device
    is_tiny: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return platform.processor() or platform.machine()

    def about(self) -> dict[str, Any]:
        """The device, the versions, and which products torch's own attention may choose."""
        import triton

        may: Any = torch.backends.cuda
        return {
            "device": self.name,
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "triton": triton.__version__,
            "transformers": transformers.__version__,
            "sdpa": {
                "cudnn": may.cudnn_sdp_enabled(),
                "flash": may.flash_sdp_enabled(),
                "mem_efficient": may.mem_efficient_sdp_enabled(),
                "math": may.math_sdp_enabled(),
            },
        }

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, compute: Callable[[], object]) -> float:
        """Seconds per call on the device: several in a row, after a warm-up."""
        repeats = 1 if self.is_tiny else _REPEATS
        compute()
        self.wait()
        start_s = time.perf_counter()
        for _ in range(repeats):
            compute()
        self.wait()
        return (time.perf_counter() - start_s) / repeats

    def release(self) -> None:
        """Frees the memory of objects without references."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Roofs:
    """Bytes per second read and written by a copy; operations per second of a matrix product."""

    bytes_per_s: float
    flops: float


def measure_roofs(machine: Machine) -> Roofs:
    """Uses random data: zeros are faster than real weights."""
    num_bytes, side = (2**20, 256) if machine.is_tiny else (4 * 2**30, 8192)
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    copy_s = machine.seconds(lambda: target.copy_(source))
    a, b = torch.randn(2, side, side, device=machine.device).to(machine.dtype)
    product_s = machine.seconds(lambda: a @ b)
    return Roofs(2 * num_bytes / copy_s, 2 * side**3 / product_s)
