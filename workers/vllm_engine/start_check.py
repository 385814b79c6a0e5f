"""What a start of vLLM needs, checked before weights are read: a known release, memory for weights
and KV cache, and /dev/shm where several ranks exchange messages. Refuses only what could not start:
where nothing tells, vLLM decides. Imports neither vLLM nor torch.
"""

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.engine.interface import ModelRefused
from workers.model.machine import free_cpu_bytes
from workers.model.nvidia import Gpu

_OLDEST, _NEWEST = (0, 31), (0, 33)  # as scripts/setup-vllm
_SHM = Path("/dev/shm")  # noqa: S108


def check_release(release: str) -> None:
    """Raises ModelRefused for a release that batchway does not know. A build of other sources is
    the operator's choice."""
    found = re.match(r"(\d+)\.(\d+)", release)
    if found and "dev" not in release and not _OLDEST <= (int(found[1]), int(found[2])) <= _NEWEST:
        raise ModelRefused(
            f"{sys.prefix} has vLLM {release}, and batchway drives 0.{_OLDEST[1]} to "
            f"0.{_NEWEST[1]}: run scripts/setup-vllm, or name another by --engine-python"
        )


def check_shm(num_ranks: int, needed: int) -> None:
    """Raises ModelRefused if /dev/shm lacks the bytes that the messages of several ranks may take:
    the step that is the first to touch more would kill vLLM."""
    num_free = shutil.disk_usage(_SHM).free if _SHM.is_dir() else needed
    if num_ranks > 1 and num_free < needed:
        raise ModelRefused(
            f"{_SHM} has {_gib(num_free)} free, and the messages between {num_ranks} ranks of vLLM "
            f"may take {_gib(needed)}: start the container with --ipc=host or a larger --shm-size"
        )


def check_memory(
    weight_bytes: int, kv_bytes: int, gpus: Sequence[Gpu], num_ranks: int, share: float
) -> None:
    """Raises ModelRefused if a machine's ranks do not fit: on a GPU each, of which `share` is
    theirs, or without `gpus` all into its free memory. The bytes are those of a rank; what
    nvidia-smi does not know is left to vLLM."""
    rooms: dict[str, float] = {
        f"GPU {gpu.index} ({gpu.name})": min(gpu.num_free, share * gpu.num_bytes)
        for gpu in gpus[:num_ranks]
        if gpu.num_bytes is not None and gpu.num_free is not None
    }
    if not gpus:
        rooms["this machine"] = free_cpu_bytes() / num_ranks
    for where, room in rooms.items():
        if weight_bytes + kv_bytes > room:
            cache = f" and {_gib(kv_bytes)} for its KV cache" if kv_bytes else ""
            raise ModelRefused(
                f"each rank of vLLM needs {_gib(weight_bytes)} for weights{cache}, and {where} has "
                f"{_gib(room)} for it: end what else uses it, take a smaller model, or share the "
                "model between more GPUs by --engine-arg tensor_parallel_size=N"
            )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
