"""The device, its timer, and its measured bandwidth and compute rate."""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

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
        return torch.float32 if self.is_tiny else torch.bfloat16

    @property
    def num_batched_tokens(self) -> int:
        return 64 if self.is_tiny else 8192

    @property
    def name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return platform.processor() or platform.machine()

    def versions(self) -> dict[str, str]:
        import triton

        return {
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "triton": triton.__version__,
            "transformers": transformers.__version__,
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

    def free_bytes(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info(self.device)[0])
        return 2**30


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
