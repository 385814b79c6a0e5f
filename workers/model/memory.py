"""Default size of the KV cache."""

import os
from pathlib import Path

import torch

# The rest is for activations, a step's logits and other processes.
_CPU_SHARE = 0.25
_CUDA_SHARE = 0.85
_CGROUP = Path("/sys/fs/cgroup")


def default_kv_bytes(device: torch.device) -> int:
    """A share of the memory that is free once the weights are loaded."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes * _CUDA_SHARE)
    return int(_free_cpu_bytes() * _CPU_SHARE)


def _free_cpu_bytes() -> int:
    """Available memory of the machine, or of the container if that is less."""
    free_bytes = [_free_machine_bytes()]
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except OSError:
        limit, used = "max", 0
    if limit != "max":
        free_bytes.append(max(0, int(limit) - used))
    return min(free_bytes)


def _free_machine_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: use half of it
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kibibytes["MemAvailable"] * 1024
