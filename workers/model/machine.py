"""CPU cores and memory that this process may use, in a container too. Imports no torch."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")


def available_cores(membership: Path = _MEMBERSHIP, cgroup: Path = _CGROUP) -> int:
    """The cores of its affinity, or what the quota of its control groups (version 1 or 2) allows if
    that is less."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min([cores, *(max(1, math.ceil(quota)) for quota in _quotas(membership, cgroup))])


def _quotas(membership: Path, cgroup: Path) -> Iterator[float]:
    """Yields the quotas in cores, of the process's own groups and all above them. In a container
    the named folders may be missing; its own group is then the root."""
    try:
        lines = membership.read_text("utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root, read = cgroup, _quota_of_version_2
        if controllers:
            root, read = cgroup / "cpu", _quota_of_version_1
            if "cpu" not in controllers.split(","):
                continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents[: len(own.relative_to(root).parts)]):
            try:
                quota_us, period_us = read(folder)
            except (OSError, ValueError):  # no file, or no limit
                continue
            if quota_us > 0:
                yield quota_us / period_us


def _quota_of_version_2(folder: Path) -> tuple[int, int]:
    quota_us, period_us = (folder / "cpu.max").read_text("utf-8").split()
    return int(quota_us), int(period_us)


def _quota_of_version_1(folder: Path) -> tuple[int, int]:
    quota_us = (folder / "cpu.cfs_quota_us").read_text("utf-8")
    return int(quota_us), int((folder / "cpu.cfs_period_us").read_text("utf-8"))


def free_cpu_bytes() -> int:
    limit = _limit_bytes()
    machine = _meminfo_bytes("MemAvailable") or _all_bytes() // 2  # not Linux: half of it
    if limit is None:
        return machine
    used = int((_CGROUP / "memory.current").read_text("utf-8")) - _cached_bytes()
    return min(machine, max(0, limit - used))


def total_cpu_bytes() -> int:
    """All bytes, whether free or not."""
    machine = _meminfo_bytes("MemTotal") or _all_bytes()
    limit = _limit_bytes()
    return machine if limit is None else min(machine, limit)


def _limit_bytes() -> int | None:
    """The container's limit, if it has one."""
    try:
        limit = (_CGROUP / "memory.max").read_text("utf-8").strip()
    except OSError:
        return None
    return None if limit == "max" else int(limit)


def _cached_bytes() -> int:
    """The container's pages of files, such as of weights just downloaded, which the kernel drops
    where memory is wanted."""
    lines = (_CGROUP / "memory.stat").read_text("utf-8").splitlines()
    sizes = {name: int(value) for name, value in map(str.split, lines)}
    return sizes.get("active_file", 0) + sizes.get("inactive_file", 0)


def _meminfo_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError:
        return None
    kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kibibytes[name] * 1024


def _all_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
