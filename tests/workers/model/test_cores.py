"""The number of threads follows affinity and quotas."""

import os
from pathlib import Path

import pytest

from workers.model.machine import available_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may run on eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def member_of(folder: Path, *lines: str) -> Path:
    file = folder / "membership"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_without_a_quota_the_affinity_counts(tmp_path: Path) -> None:
    """Also where there are no control groups."""
    write(tmp_path / "cgroup", cpu__max="max 100000")

    assert available_cores(member_of(tmp_path, "0::/"), tmp_path / "cgroup") == 8
    assert available_cores(tmp_path / "no file", tmp_path / "no folder") == 8


@pytest.mark.parametrize(
    ("quota_us", "cores"), [(50_000, 1), (100_000, 1), (150_000, 2), (300_000, 3), (900_000, 8)]
)
def test_a_quota_is_rounded_up(tmp_path: Path, quota_us: int, cores: int) -> None:
    """A part of a core is worth a thread. In version 1 and 2."""
    write(tmp_path / "2", cpu__max=f"{quota_us} 100000")
    write(tmp_path / "1/cpu", cpu__cfs_quota_us=f"{quota_us}", cpu__cfs_period_us="100000")

    assert available_cores(member_of(tmp_path, "0::/"), tmp_path / "2") == cores
    joined = member_of(tmp_path, "4:memory:/", "1:cpu,cpuacct:/", "0::/")
    assert available_cores(joined, tmp_path / "1") == cores


def test_the_smallest_quota_above_a_process_counts(tmp_path: Path) -> None:
    """A service's own group may have none, but its slice."""
    write(tmp_path / "a.slice/b.service", cpu__max="max 100000")
    write(tmp_path / "a.slice", cpu__max="200000 100000")
    write(tmp_path, cpu__max="400000 100000")

    assert available_cores(member_of(tmp_path, "0::/a.slice/b.service"), tmp_path) == 2


def test_a_container_that_names_the_hosts_folder_has_its_quota_at_the_root(tmp_path: Path) -> None:
    """Version 1 without a namespace."""
    write(tmp_path / "cpu", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")

    assert available_cores(member_of(tmp_path, "1:cpu:/docker/0123"), tmp_path) == 2
    write(tmp_path / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert available_cores(member_of(tmp_path, "1:cpu:/docker/0123"), tmp_path) == 8
