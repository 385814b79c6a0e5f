"""NVIDIA GPUs as nvidia-smi shows them, and what they need before torch can use them. Imports no
torch, so that commands can look before anything is loaded."""

import ctypes
import logging
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

log = logging.getLogger("batchway.engine")

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_TIMEOUT_S = 30.0  # without nvidia-persistenced the driver starts anew for each query
_QUERY = ("index", "uuid", "name", "driver_version", "memory.total", "memory.free")
_NO_DEVICES = "No devices were found"
# The first driver for each major version of CUDA; minor versions need no other.
_LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine. `num_bytes`: of its memory, of which `num_free` were free when it was
    looked for; None where nvidia-smi does not know."""

    index: str
    uuid: str
    name: str
    driver: str  # its version, as 580.65.06
    num_bytes: int | None
    num_free: int | None


def installed_gpus() -> tuple[Gpu, ...]:
    """All GPUs that nvidia-smi sees; none without that program, or where it fails, which is
    logged."""
    program = shutil.which("nvidia-smi")
    return () if program is None else _query(program)


@cache
def _query(program: str) -> tuple[Gpu, ...]:
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as exc:
        log.warning("nvidia-smi does not answer, so no GPU is used: %s", exc)
        return ()
    output = done.stdout.strip()
    if done.returncode != 0:
        if _NO_DEVICES not in output:
            reason = (output or done.stderr.strip()).partition("\n")[0]
            log.warning("nvidia-smi fails, so no GPU is used: %s", reason)
        return ()
    # A line that is no row of the table is a warning of the driver's.
    rows = [[field.strip() for field in line.split(",")] for line in output.splitlines()]
    rows = [row for row in rows if len(row) == len(_QUERY)]
    return tuple(
        Gpu(
            index,
            uuid,
            name,
            driver,
            *(int(size) * 2**20 if size.isdigit() else None for size in sizes),
        )
        for index, uuid, name, driver, *sizes in rows
    )


def visible_gpus(environ: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """The GPUs that a process with these variables may use: who has one is decided here."""
    return shown_gpus(installed_gpus(), environ.get(VISIBLE_VARIABLE))


def shown_gpus(gpus: Sequence[Gpu], shown: str | None) -> tuple[Gpu, ...]:
    """What CUDA_VISIBLE_DEVICES, `shown`, leaves of `gpus`: CUDA reads it up to the first id that
    it does not know. None: all of them."""
    if shown is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for each in (part.strip() for part in shown.split(",")):
        if each.startswith("MIG-"):  # a part of a GPU; nvidia-smi does not say of which
            named = gpus[:1]
        else:
            is_uuid = each.startswith("GPU-")
            named = [g for g in gpus if (g.uuid.startswith(each) if is_uuid else g.index == each)]
        if not named:
            break
        found.append(named[0])
    return tuple(found)


def driver_fault(driver: str, cuda: str | None) -> str | None:
    """Why torch built for this version of CUDA cannot use a GPU with this driver, and what helps;
    None if the driver is new enough, or either version is unknown. cuda None: built without."""
    if cuda is None:
        return "this torch is built without CUDA: install a CUDA build"
    needed = _LEAST_DRIVERS.get(_major(cuda))
    if needed is None or not 0 < _major(driver) < needed or _libcuda_major() >= _major(cuda):
        return None
    return (
        f"its driver is {driver}, and torch for CUDA {cuda} needs {needed} or later: install a "
        "newer driver, or torch for an older CUDA"
    )


def _libcuda_major() -> int:
    """The major version of CUDA in the driver's library, which a compatibility package may raise
    above the driver's own; 0 without a library."""
    found = ctypes.c_int()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    return found.value // 1000


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0


def unusable_gpu(gpus: Sequence[Gpu], cuda: str | None, reason: str = "") -> str | None:
    """Why torch built for `cuda` cannot use any of `gpus`; `reason`: torch's own, for what is not
    the driver's fault. None if there are none, or neither says why not."""
    if not gpus or not (fault := driver_fault(gpus[0].driver, cuda) or reason):
        return None
    return f"nvidia-smi sees {gpus[0].name}, but torch cannot use it: {fault}"
