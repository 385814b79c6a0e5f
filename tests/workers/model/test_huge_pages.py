"""Tensors on huge pages: moved where the system has them, and never changed."""

import platform
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from workers.model.huge_pages import use_huge_pages

_NUM_BYTES = 2**25


@pytest.mark.skipif(platform.system() != "Linux", reason="other systems have no such pages")
def test_what_is_filled_moves_to_huge_pages_and_stays_what_it_was() -> None:
    """Where the system lets a process ask for them; where it does not, nothing happens."""
    weights = torch.arange(_NUM_BYTES // 4, dtype=torch.float32)
    untouched = torch.empty(_NUM_BYTES // 4)

    num_bytes = use_huge_pages([untouched])
    untouched.fill_(1.0)

    assert torch.equal(weights, torch.arange(_NUM_BYTES // 4, dtype=torch.float32))
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    if "[never]" in enabled:
        assert num_bytes == 0
    else:
        assert _huge_bytes(untouched) > 0
    if num_bytes:  # Linux before 6.1 moves nothing that is filled
        assert _huge_bytes(weights) > 0


def _huge_bytes(tensor: Tensor) -> int:
    """In the mapping in which the tensor lies."""
    is_inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(span[1], 16) <= tensor.data_ptr() < int(span[2], 16)
        elif is_inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    return found
