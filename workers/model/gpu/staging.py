"""Between host and device without waiting: small numbers there, sampled ids back."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(numbers: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """A copy on the device. On CUDA by way of pinned memory, which torch keeps until the copy is
    done, so that the host goes on at once.
    """
    if device.type != "cuda":
        return torch.from_numpy(numbers.copy()).to(device)
    pinned = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=True)
    pinned.numpy()[...] = numbers
    return pinned.to(device, non_blocking=True)


class HostCopy:
    """A tensor on its way to the host; `read` waits for it and for nothing after it."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def read(self) -> list[int]:
        """The numbers of a 1-D integer tensor."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._host.tolist()
        return numbers
