"""CPU cores that this process may use. Imports no torch."""

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
        lines = membership.read_text().splitlines()
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
    quota_us, period_us = (folder / "cpu.max").read_text().split()
    return int(quota_us), int(period_us)


def _quota_of_version_1(folder: Path) -> tuple[int, int]:
    quota_us = (folder / "cpu.cfs_quota_us").read_text()
    return int(quota_us), int((folder / "cpu.cfs_period_us").read_text())
