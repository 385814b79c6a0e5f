"""Memory of the machine, or of the container if that is less. Imports no torch."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_cpu_bytes() -> int:
    """The available bytes."""
    limit = _limit_bytes()
    machine = _meminfo_bytes("MemAvailable") or _all_bytes() // 2  # not Linux: half of it
    if limit is None:
        return machine
    used = int((_CGROUP / "memory.current").read_text()) - _cached_bytes()
    return min(machine, max(0, limit - used))


def total_cpu_bytes() -> int:
    """All bytes, whether free or not."""
    machine = _meminfo_bytes("MemTotal") or _all_bytes()
    limit = _limit_bytes()
    return machine if limit is None else min(machine, limit)


def _limit_bytes() -> int | None:
    """The container's limit, if it has one."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else int(limit)


def _cached_bytes() -> int:
    """The container's pages of files, such as of weights just downloaded, which the kernel drops
    where memory is wanted."""
    lines = (_CGROUP / "memory.stat").read_text().splitlines()
    sizes = {name: int(value) for name, value in map(str.split, lines)}
    return sizes.get("active_file", 0) + sizes.get("inactive_file", 0)


def _meminfo_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kibibytes[name] * 1024


def _all_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
