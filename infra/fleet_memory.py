"""Shares of each device's memory between the workers of a fleet, checked before any starts."""

import argparse
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infra import options as opts
from infra.fleet import FleetEntry
from infra.preconditions import UsageError
from workers.model.machine import total_cpu_bytes
from workers.model.nvidia import installed_gpus
from workers.model.place import least_weight_bytes

_CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Device:
    """The processor, or a GPU by the id that nvidia-smi knows; `num_bytes` of memory, if known."""

    name: str
    num_bytes: int | None


def share_memory(entries: Sequence[FleetEntry]) -> None:
    """Gives workers that share a GPU and have no share of its memory equal parts of the rest.
    Raises UsageError if the shares of a device exceed it, or the weights their shares."""
    by_device: dict[Device, list[FleetEntry]] = {}
    for entry in entries:
        by_device.setdefault(_device(entry), []).append(entry)
    for device, each in by_device.items():
        _check_sum(device, each)
        if device.name != _CPU and sum(entry.count for entry in each) > 1:
            _share_rest(each)
        _check_weights(device, each)


def _check_sum(device: Device, entries: Sequence[FleetEntry]) -> None:
    given = [entry for entry in entries if entry.options.memory_share is not None]
    total = _given(entries)
    if total > 1 + 1e-9 or (total > 1 - 1e-9 and len(given) < len(entries)):
        shares = ", ".join(
            f"{entry.count} × {entry.options.memory_share:g} of {entry.served_model_name!r}"
            for entry in given
        )
        what = "more than all of it" if len(given) == len(entries) else "leaves others nothing"
        raise UsageError(
            f"{given[-1].where}: memory_share: the shares of {device.name} add up to {total:g}, "
            f"{what}: {shares}"
        )


def _share_rest(entries: Sequence[FleetEntry]) -> None:
    rest, sharing = 1 - _given(entries), _sharing(entries)
    num_workers = sum(entry.count for entry in sharing)
    for entry in sharing:
        entry.options.memory_share = math.floor(1000 * rest / num_workers) / 1000


def _check_weights(device: Device, entries: Sequence[FleetEntry]) -> None:
    if device.num_bytes is None:
        return
    for entry in entries:
        share, needed = entry.options.memory_share, _weight_bytes(entry, device)
        if share is not None and needed > share * device.num_bytes:
            raise UsageError(
                f"{entry.where}: memory_share: {share:g} of the {_gib(device.num_bytes)} of "
                f"{device.name} is {_gib(share * device.num_bytes)}, but the weights of "
                f"{entry.served_model_name!r} need {_gib(needed)}, a share of "
                f"{needed / device.num_bytes:.3f}, and a KV cache beside them"
            )
    sharing = _sharing(entries)
    needed = sum(entry.count * _weight_bytes(entry, device) for entry in sharing)
    room = (1 - _given(entries)) * device.num_bytes
    if needed > room:
        raise UsageError(
            f"{sharing[-1].where}: count: {device.name} has {_gib(room)} of memory for workers "
            f"without a memory_share, but their weights need {_gib(needed)}"
        )


def _given(entries: Iterable[FleetEntry]) -> float:
    return sum(entry.count * (entry.options.memory_share or 0.0) for entry in entries)


def _sharing(entries: Iterable[FleetEntry]) -> list[FleetEntry]:
    return [entry for entry in entries if entry.options.memory_share is None]


def _weight_bytes(entry: FleetEntry, device: Device) -> int:
    if entry.options.engine != "own" or entry.options.engine_module is not None:
        return 0  # vLLM checks its own, with the arguments that it alone knows
    options = entry.options
    return least_weight_bytes(
        options.model, options.dtype, options.quantization, on_gpu=device.name != _CPU
    )


def _device(entry: FleetEntry) -> Device:
    """The device of an entry's workers; for `auto` a GPU if there is one."""
    kind, _, number = entry.options.device.partition(":")
    cpu = Device(_CPU, total_cpu_bytes())
    if kind == _CPU:
        return cpu
    try:
        gpu = opts.visible_gpu(int(number or 0), os.environ.get(opts.VISIBLE_VARIABLE))
    except argparse.ArgumentTypeError as exc:
        if kind == "auto":
            return cpu
        raise UsageError(f"{entry.where}: {str(exc).removeprefix('--')}") from exc
    num_bytes = _gpu_bytes(gpu)
    return cpu if kind == "auto" and num_bytes is None else Device(f"GPU {gpu}", num_bytes)


def _gpu_bytes(gpu: str) -> int | None:
    """The memory of a GPU; None if it is unknown."""
    sizes = [each.num_bytes for each in installed_gpus() if gpu in (each.index, each.uuid)]
    return sizes[0] if sizes else None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
