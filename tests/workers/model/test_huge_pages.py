"""Tensors on huge pages: moved if the system has such pages, and never changed."""

import ctypes
import json
import mmap
import platform
import re
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pytest
import torch
from torch import Tensor

from workers.model.memory import touch, use_huge_pages

_NUM_BYTES = 2**26  # more than an allocator keeps to hand out again
_MADV_COLLAPSE = 25  # Linux 6.1
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(
    not _ENABLED.exists() or "[never]" in _ENABLED.read_text(),
    reason="this system has no such pages",
)


@pytest.mark.campaign
def test_unwritten_tensors_are_written_to_huge_pages() -> None:
    """A KV cache, page by page, when it is first written."""
    cache = torch.empty(_NUM_BYTES // 4)

    use_huge_pages([cache])
    cache.fill_(1.0)

    assert _huge_bytes(cache) > 0


@pytest.mark.campaign
@pytest.mark.skipif(
    [int(n) for n in re.findall(r"\d+", platform.release())[:2]] < [6, 1],
    reason="Linux moves what is filled since 6.1",
)
def test_filled_tensors_move_unchanged() -> None:
    """Weights, all at once. Runs in its own process: a larger one uses up the huge pages for other
    mappings first."""
    answer = _in_a_process_of_its_own("moved_bytes")
    if answer == "none to be had":
        pytest.skip("this system's free memory is in pieces of less than 2 MiB")
    assert int(answer) > 0


def moved_bytes() -> int | str:
    """The moved bytes of 64 MiB that were filled."""
    with mmap.mmap(-1, 2 * _NUM_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as asked_directly:
        asked_directly.write(bytes([1]) * len(asked_directly))
        try:
            asked_directly.madvise(_MADV_COLLAPSE)
        except OSError:
            return "none to be had"
    weights = torch.arange(_NUM_BYTES // 4, dtype=torch.float32)

    assert use_huge_pages([]) > 0

    assert torch.equal(weights, torch.arange(_NUM_BYTES // 4, dtype=torch.float32))
    return _huge_bytes(weights)


@pytest.mark.campaign
@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another allocator than glibc's"
)
def test_freed_memory_returns_to_the_system() -> None:
    """The allocator would keep memory below what is still in use, and its pages would be moved.
    Runs in its own process: in a larger one, other pages are moved meanwhile."""
    assert int(_in_a_process_of_its_own("given_back_bytes")) > _NUM_BYTES // 2


def given_back_bytes() -> int:
    """The returned bytes of 64 MiB that were freed except for the end."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    part_bytes = 100_000  # less than what the allocator asks the system for by itself
    parts = [libc.malloc(part_bytes) for _ in range(_NUM_BYTES // part_bytes)]
    for part in parts:
        ctypes.memset(part, 1, part_bytes)
    *freed, last = parts
    for part in freed:
        libc.free(part)
    before = _resident_bytes()
    use_huge_pages([])
    given_back = before - _resident_bytes()
    libc.free(last)
    return given_back


@pytest.mark.campaign
@pytest.mark.skipif(
    [int(n) for n in re.findall(r"\d+", platform.release())[:2]] < [5, 14],
    reason="Linux gives pages ahead since 5.14",
)
def test_prefaulted_pages_are_ready() -> None:
    """Writing there causes no page fault, and earlier contents are unchanged. Runs in its own
    process: a larger one may get memory that is mapped already."""
    faults = json.loads(_in_a_process_of_its_own("faults_of_halves"))
    for of_first, of_second in faults:
        assert of_first < 64
        assert of_second >= _NUM_BYTES // 2 // 2**22


def faults_of_halves() -> list[list[int]]:
    """Page faults while the first and the second half are written, of keys and of values."""
    keys, values = torch.empty(_NUM_BYTES // 4), torch.empty(_NUM_BYTES // 4)
    keys[:4] = 7.0

    touch([keys, values], _NUM_BYTES)

    assert keys[:4].tolist() == [7.0] * 4
    found = []
    for cache in (keys, values):
        before = getrusage(RUSAGE_SELF).ru_minflt
        cache[4 : len(cache) // 2 - 4096] = 1.0
        ready = getrusage(RUSAGE_SELF).ru_minflt
        cache[len(cache) // 2 + 4096 :] = 1.0
        found.append([ready - before, getrusage(RUSAGE_SELF).ru_minflt - ready])
    return found


def _in_a_process_of_its_own(function: str) -> str:
    """The result of a function of this file in a new process."""
    asking = f"from {__name__} import {function}; print({function}())"
    answered = subprocess.run(
        [sys.executable, "-c", asking], stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    return answered.stdout.strip()


def _resident_bytes() -> int:
    """Resident memory of this process, without files."""
    [number] = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(number) * 1024


def _huge_bytes(tensor: Tensor) -> int:
    """Huge pages in the mapping of the tensor's middle: its ends may share a page with other
    data."""
    is_inside, found, middle = False, 0, tensor.data_ptr() + tensor.nbytes // 2
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(span[1], 16) <= middle < int(span[2], 16)
        elif is_inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    return found
