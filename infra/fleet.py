"""Reads `fleet.yaml`: the models of `batchway up --fleet` and the workers of each.

An entry's fields are options of `batchway worker`, checked by the same parser.
"""

import argparse
import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from infra.preconditions import UsageError, check_model
from workers.model.machine import available_cores

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
        check_model(options.model)
    choose_engine(options)
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
    if options.engine_module is None:
        try:
            check_model(options.model)
        except UsageError as exc:
            raise UsageError(f"{where}: {str(exc).removeprefix('--')}") from exc
    try:
        choose_engine(options)
        served_name = opts.served_name(options)
        candidate = entry_candidate(options)
    except (UsageError, argparse.ArgumentTypeError) as exc:
        raise UsageError(f"{where}: {exc}") from exc
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
