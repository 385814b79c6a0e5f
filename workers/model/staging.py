"""The one place where numbers of a step go from the host to the device."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(numbers: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copies an array of any type to the device. On CUDA through pinned memory, which torch keeps
    until the copy is done, so that the host does not wait for the device. On a CPU it may share the
    array's memory."""
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(device)
    like = torch.from_numpy(numbers[:0])
    pinned = torch.empty(numbers.shape, dtype=like.dtype, pin_memory=True)
    pinned.numpy()[...] = numbers
    return pinned.to(device, non_blocking=True)
