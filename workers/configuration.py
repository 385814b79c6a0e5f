"""Reads and checks `batching.yaml`, an operator's batching options beside a model."""

import difflib
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import msgspec
import yaml  # type: ignore[import-untyped]  # types are a separate package

from contract.jobs import DEFAULT_LANES
from contract.yaml_files import PlainLoader, YamlFault, opened, read_text
from workers.ipc.messages import EngineOptions, LaneOptions, StrategyName, StrategyOptions

FILE_NAME = "batching.yaml"


class ConfigurationError(Exception):
    """The file is invalid. The message has one line per error: file, line, key, reason."""


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """The file's values, named as the fields of EngineOptions; without defaults."""

    values: Mapping[str, Any]
    version: str  # a hash of the values: comments, order and number format do not change it

    def apply(self, options: EngineOptions) -> EngineOptions:
        """Applies the file's values, except to options that the command line has changed from their
        defaults."""
        default = EngineOptions(model_path="")
        is_set = {name for name in self.values if getattr(options, name) != getattr(default, name)}
        values = {name: value for name, value in self.values.items() if name not in is_set}
        return msgspec.structs.replace(options, **values, batching_version=self.version)


def find(model_path: str) -> Path | None:
    path = Path(model_path) / FILE_NAME
    return path if path.is_file() else None


def load(path: Path) -> BatchingConfig:
    """Reads and checks the file. Raises ConfigurationError."""
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"{path}: cannot be read: {exc}") from exc
    except YamlFault as exc:
        raise ConfigurationError(f"{path}:{exc.line}: {exc}") from exc
    return parse(text, path.name)


def configured(
    options: EngineOptions, batching: Path | None, candidate: Path | None
) -> EngineOptions:
    """The options with the candidate's file, else with `batching`, else with that beside the model,
    if it exists. Raises ConfigurationError, also where the candidate cannot be compared."""
    path = batching or find(options.model_path)
    control = options if path is None else load(path).apply(options)
    if candidate is None:
        return control
    changed = load(candidate).apply(options)
    if problems := _incomparable(control, changed):
        raise ConfigurationError("\n".join(f"{candidate.name}: {text}" for text in problems))
    return changed


def _incomparable(control: EngineOptions, candidate: EngineOptions) -> list[str]:
    """Why two configurations cannot serve one model's jobs beside each other."""
    if msgspec.structs.replace(candidate, batching_version=control.batching_version) == control:
        return ["both files are the same configuration, with the options of the command line"]
    problems = [
        f"{name}: must be the same for the control and the candidate, or they answer differently"
        for name in ("max_model_len", "max_output_tokens")
        if getattr(control, name) != getattr(candidate, name)
    ]
    names = [{lane.name for lane in options.lanes} for options in (control, candidate)]
    if only := sorted((names[0] ^ names[1]) - set(DEFAULT_LANES)):
        problems.append(f"lanes.{only[0]}: only one of control and candidate has it")
    return problems


def parse(text: str, file_name: str = FILE_NAME) -> BatchingConfig:
    """Checks the text of a file. Raises ConfigurationError with all errors."""
    try:
        with opened(text) as loader:
            reader = _Reader(loader, file_name)
            root = loader.get_single_node()
            values = {} if root is None else reader.mapping(root, "", _FILE)
    except YamlFault as exc:
        raise ConfigurationError(f"{file_name}:{exc.line}: {exc}") from exc
    if reader.errors:
        raise ConfigurationError("\n".join(reader.errors))
    renamed = {_OPTION_NAMES.get(key, key): value for key, value in values.items()}
    canonical = msgspec.json.encode(renamed, order="deterministic")
    version = hashlib.sha256(canonical).hexdigest()[:12]
    return BatchingConfig(MappingProxyType(renamed), version)


# Keys of the file whose option has another name.
_OPTION_NAMES = {
    "token_budget": "max_num_batched_tokens",
    "prefix_cache": "prefix_caching",
}


class _Wrong(Exception):
    """A value is invalid for its key. The message follows the key's name."""


# A check of the parsed value, or a function of reader, node and key path.
Check = Callable[[Any], Any]
Rule = Callable[["_Reader", yaml.Node, str], Any]


class _Reader:
    """Reads YAML nodes, which have line numbers, and collects errors."""

    def __init__(self, loader: PlainLoader, file_name: str) -> None:
        self._loader = loader
        self._file_name = file_name
        self.errors: list[str] = []

    def value(self, node: yaml.Node) -> Any:
        return self._loader.construct_object(node, deep=True)

    def mapping(self, node: yaml.Node, path: str, rules: Mapping[str, Rule]) -> dict[str, Any]:
        """The checked values of a mapping with known keys."""
        found: dict[str, Any] = {}
        for key, key_node, value_node in self.items(node, path):
            place = _join(path, key)
            if key not in rules:
                self.complain(key_node, place, f"unknown key{_suggestion(key, rules)}")
                continue
            try:
                found[key] = rules[key](self, value_node, place)
            except _Wrong as wrong:
                self.complain(value_node, place, str(wrong))
        return found

    def items(self, node: yaml.Node, path: str) -> list[tuple[str, yaml.Node, yaml.Node]]:
        """Key, key node and value node; reports duplicate keys."""
        if not isinstance(node, yaml.MappingNode):
            self.complain(node, path, "must be a mapping of keys to values")
            return []
        found: dict[str, tuple[str, yaml.Node, yaml.Node]] = {}
        for key_node, value_node in node.value:
            key = str(self.value(key_node))
            if key in found:
                self.complain(key_node, _join(path, key), "duplicate key")
            found[key] = key, key_node, value_node
        return list(found.values())

    def complain(self, node: yaml.Node, path: str, message: str) -> None:
        place = f"{path}: " if path else ""
        self.errors.append(f"{self._file_name}:{node.start_mark.line + 1}: {place}{message}")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _suggestion(key: str, rules: Mapping[str, Rule]) -> str:
    close = difflib.get_close_matches(key, rules, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(rules))}"


# --- values -----------------------------------------------------------------------------------


def _checked(check: Check) -> Rule:
    return lambda reader, node, path: check(reader.value(node))


def _integer(minimum: int) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise _Wrong(f"must be an integer of at least {minimum}, not {value!r}")
        return value

    return check


def _real(accepts: Callable[[float], bool], wanted: str, per_unit: float = 1.0) -> Check:
    """Checks for a finite number; returns it divided by `per_unit`."""

    def check(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not accepts(value):
            raise _Wrong(f"must be {wanted}, not {value!r}")
        return float(value) / per_unit

    return check


_share = _real(lambda value: 0 <= value <= 1, "between 0 and 1")
_positive_share = _real(lambda value: 0 < value <= 1, "over 0 and at most 1")
_minimum_share = _real(
    lambda value: 0 <= value < 1, "at least 0 and below 1, or the other lanes get nothing"
)
_slowdown = _real(lambda value: value > 1, "over 1")
_seconds = _real(lambda value: value >= 0, "seconds, at least 0")
_milliseconds = _real(lambda value: value > 0, "milliseconds, over 0", per_unit=1000.0)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong(f"must be true or false, not {value!r}")
    return value


def _edges(value: Any) -> tuple[int, ...]:
    edges = value if isinstance(value, list) else [value]
    for edge in edges:
        _integer(1)(edge)
    if any(low >= high for low, high in pairwise(edges)):
        raise _Wrong(f"must be in ascending order, not {value!r}")
    return tuple(edges)


def _strategy_name(value: Any) -> StrategyName:
    names: tuple[StrategyName, ...] = get_args(StrategyName)
    if value not in names:
        raise _Wrong(f"must be one of {', '.join(names)}, not {value!r}")
    name: StrategyName = value
    return name


def _strategy(reader: _Reader, node: yaml.Node, path: str) -> StrategyOptions:
    if isinstance(node, yaml.ScalarNode):
        return StrategyOptions(name=_strategy_name(reader.value(node)))
    values = reader.mapping(node, path, _STRATEGY)
    name = values.get("name", "continuous")
    for key, key_node, _ in reader.items(node, path):
        if key in _STRATEGY and key not in _PARAMETERS[name]:
            reader.complain(key_node, _join(path, key), f"not a parameter of {name} batching")
    return StrategyOptions(**values)


def _lanes(reader: _Reader, node: yaml.Node, path: str) -> tuple[LaneOptions, ...]:
    lanes = []
    for name, _, value_node in reader.items(node, path):
        values = reader.mapping(value_node, _join(path, name), _LANE)
        fields = {_LANE_FIELDS.get(key, key): value for key, value in values.items()}
        lanes.append(LaneOptions(name=name, **fields))
    if sum(lane.min_share or 0.0 for lane in lanes) > 1:
        raise _Wrong("the minimum shares add up to more than 1")
    return tuple(lanes)


_PARAMETERS = {
    "continuous": {"name"},
    "static": {"name", "batch_size", "window_s", "drain_share", "padded"},
    "dynamic": {"name", "batch_size", "window_s", "bucket_edges", "padded"},
}
_STRATEGY: Mapping[str, Rule] = {
    "name": _checked(_strategy_name),
    "batch_size": _checked(_integer(1)),
    "window_s": _checked(_seconds),
    "drain_share": _checked(_share),
    "bucket_edges": _checked(_edges),
    "padded": _checked(_truth),
}
_LANE_FIELDS = {
    "itl_target_ms": "itl_target_s",
    "minimum_share": "min_share",
}
_LANE: Mapping[str, Rule] = {
    "priority": _checked(_integer(0)),
    "itl_target_ms": _checked(_milliseconds),
    "minimum_share": _checked(_minimum_share),
    "ageing_tokens": _checked(_integer(1)),
    "max_slowdown": _checked(_slowdown),
    "strategy": _strategy,
}
_FILE: Mapping[str, Rule] = {
    "strategy": _strategy,
    "lanes": _lanes,
    "token_budget": _checked(_integer(1)),
    "prefill_share": _checked(_positive_share),
    "prefix_cache": _checked(_truth),
    "speculation": _checked(_truth),
    "kv_high_water": _checked(_positive_share),
    "max_num_seqs": _checked(_integer(1)),
    "max_model_len": _checked(_integer(1)),
    "max_output_tokens": _checked(_integer(1)),
}
