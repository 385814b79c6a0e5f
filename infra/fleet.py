"""Reads `fleet.yaml`: the models of `batchway up --fleet` and the workers of each.

An entry's fields are options of `batchway worker`, checked by the same parser. Shares of each
device's memory are checked before any worker starts.
"""

import argparse
import difflib
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from contract.yaml_files import YamlFault, load_file
from infra import options as opts
from infra.ab_command import WORKER_CANDIDATE_SHARE, add_candidate_options, entry_candidate
from infra.demo_model import demo_model_path
from infra.engine_choice import choose_engine
from infra.option_values import integer
from infra.preconditions import UsageError, check_model, make_folder
from workers.model.machine import available_cores, total_cpu_bytes
from workers.model.nvidia import installed_gpus

MAX_WORKERS = 64  # of one entry
_OF_CARD = (
    *("model", "engine", "lanes", "generation_config", "tool_call_parser", "reasoning_parser"),
    "default_chat_template_kwargs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEntry:
    """Equal workers of one model. `options` are those of one of them. `candidate`: arguments that
    make them the candidate of an A/B."""

    where: str  # names the entry in messages
    served_model_name: str
    count: int
    options: argparse.Namespace
    candidate: tuple[str, ...] = ()


def fleet_of(options: argparse.Namespace) -> tuple[FleetEntry, ...]:
    """The workers of `batchway up`: those of --fleet, or of the one model. Raises UsageError, and
    argparse.ArgumentTypeError for an engine's options."""
    if options.fleet is None:
        return _fleet_of_one(options)
    for option, is_given in (
        ("--model", options.model != str(demo_model_path())),
        ("--served-model-name", options.served_model_name is not None),
        ("--workers", options.workers != 1),
        ("--candidate", options.candidate is not None),
    ):
        if is_given:
            raise UsageError(f"{option} cannot be combined with --fleet, whose entries say it")
    return read_fleet(options.fleet, options)


def _fleet_of_one(options: argparse.Namespace) -> tuple[FleetEntry, ...]:
    if options.engine_module is None:
        make_folder(options)
    choose_engine(options)
    if options.engine_module is None:
        check_model(options.model, options.engine)
    options.lanes = opts.WORKER_DEFAULTS.lanes
    name = opts.served_name(options)
    entry = FleetEntry(
        where="--model", served_model_name=name, count=options.workers, options=options
    )
    return (entry,)


def read_fleet(path: Path, given: argparse.Namespace) -> tuple[FleetEntry, ...]:
    """Returns the entries of the file; `given`, the options of `batchway up`, are their defaults.
    Raises UsageError, which names entry and field."""
    try:
        root = load_file(path)
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path}: cannot be read: {exc}") from exc
    except YamlFault as exc:
        raise UsageError(f"{path}:{exc.line}: {exc}") from exc
    if not isinstance(root, dict) or set(root) != {"models"}:
        raise UsageError(f"{path}: must be a mapping with the one key `models`")
    rows = root["models"]
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{path}: models: must be a list with at least one entry")
    entries = tuple(
        _entry(f"{path}: entry {number}", row, given) for number, row in enumerate(rows, 1)
    )
    check_names(entries)
    return entries


def check_names(entries: Sequence[FleetEntry]) -> None:
    """Raises UsageError if workers of one name would differ in what its card contains: a name
    stands for one model, and its card for all its workers."""
    first: dict[str, FleetEntry] = {}
    for entry in entries:
        other = first.setdefault(entry.served_model_name, entry)
        for field in _OF_CARD:
            if getattr(entry.options, field) != getattr(other.options, field):
                raise UsageError(
                    f"{entry.where}: {field}: differs from that of {other.where}, which has the "
                    "same served_model_name"
                )


def worker_names(entries: Sequence[FleetEntry]) -> Iterator[tuple[str, FleetEntry]]:
    """Yields a name for each worker: with several models, that of its model and a number."""
    has_several = len({entry.served_model_name for entry in entries}) > 1
    num_workers: Counter[str] = Counter()
    for entry in entries:
        for _ in range(entry.count):
            stem = entry.served_model_name if has_several else "worker"
            num_workers[stem] += 1
            yield f"{stem}-{num_workers[stem]}", entry


def share_threads(entries: Sequence[FleetEntry]) -> None:
    """Gives workers without `threads` equal shares of the cores, if there are several."""
    num_workers = sum(entry.count for entry in entries)
    for entry in entries:
        if num_workers > 1 and entry.options.threads is None:
            entry.options.threads = max(1, available_cores() // num_workers)


def worker_arguments(entry: FleetEntry) -> tuple[str, ...]:
    """Returns the entry as options of `batchway worker`."""
    lanes = ",".join(entry.options.lanes)
    return (*opts.model_arguments(entry.options), f"--lanes={lanes}", *entry.candidate)


# --- one entry --------------------------------------------------------------------------------


def _entry(where: str, row: Any, given: argparse.Namespace) -> FleetEntry:
    if not isinstance(row, dict) or not all(isinstance(key, str) for key in row):
        raise UsageError(f"{where}: must be a mapping of fields to values")
    if isinstance(name := row.get("served_model_name", row.get("model")), str):
        where += f" ({name})"
    parser = _parser(where)
    defaults = vars(parser.parse_args([]))
    for key in row:
        if key not in defaults or key == "help":
            raise UsageError(f"{where}: {key}: unknown field{_suggestion(key, defaults)}")
    if row.get("model") is None:
        raise UsageError(f"{where}: model: is required: a folder, a name of the Hub, or demo")
    words = [word for key, value in row.items() for word in _words(where, key, value, defaults)]
    inherited = argparse.Namespace(**{k: v for k, v in vars(given).items() if k in defaults})
    options = parser.parse_args(words, inherited)
    if options.model == opts.DEMO_NAME and not Path(opts.DEMO_NAME).is_dir():
        options.model = str(demo_model_path())
    try:
        if options.engine_module is None:
            make_folder(options)
        choose_engine(options)
        served_name = opts.served_name(options)
        candidate = entry_candidate(options)
        if options.engine_module is None:
            check_model(options.model, options.engine)
    except (UsageError, argparse.ArgumentTypeError) as exc:
        raise UsageError(f"{where}: {str(exc).removeprefix('--')}") from exc
    return FleetEntry(
        where=where,
        served_model_name=served_name,
        count=options.count,
        options=options,
        candidate=candidate,
    )


class _EntryParser(argparse.ArgumentParser):
    """Parses one entry. Raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        option, colon, rest = message.removeprefix("argument --").partition(":")
        raise UsageError(f"{self.prog}: {option.replace('-', '_')}{colon}{rest}")


def _parser(where: str) -> argparse.ArgumentParser:
    parser = _EntryParser(prog=where, add_help=False, allow_abbrev=False)
    opts.add_model_options(parser)
    opts.add_options(parser, opts.WORKER_LANES)
    add_candidate_options(parser, share_default=str(WORKER_CANDIDATE_SHARE))
    parser.add_argument("--count", type=integer(1, MAX_WORKERS), default=1)
    return parser


def _words(where: str, key: str, value: Any, defaults: Mapping[str, Any]) -> list[str]:
    """Returns a field as arguments of the command line."""
    option = f"--{key.replace('_', '-')}"
    match value:
        case bool() if isinstance(defaults[key], bool):
            return [option] * value
        case None:
            raise UsageError(f"{where}: {key}: has no value")
        case list():
            return [f"{option}={','.join(map(str, value))}"]
        case dict() if key == "default_chat_template_kwargs":
            try:
                return [f"{option}={msgspec.json.encode(value).decode()}"]
            except TypeError as exc:
                raise UsageError(f"{where}: {key}: {exc}") from exc
        case dict():
            return [f"{option}={name}={each}" for name, each in value.items()]
    return [f"{option}={value}"]


def _suggestion(key: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


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
    # It loads huggingface_hub, which takes a third of the time in which commands start.
    from workers.model.model_path import least_weight_bytes

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
