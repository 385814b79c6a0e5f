"""Reads YAML that an operator has written: plain values, and nodes with their lines.

Anchors and aliases are refused: nine lines of them stand for gigabytes. The text's size, depth and
number of nodes are limited, so that reading takes a second or two at most.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # types are a separate package

MAX_BYTES = 256 * 1024
MAX_DEPTH = 64
MAX_NODES = 20_000
_MAX_NUMBER_CHARS = 64  # also of dates
_MAX_PROBLEM_CHARS = 200  # it may quote the text


class YamlFault(Exception):
    """The text cannot be used. `line` counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


class PlainLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML is not typed
    """Loads YAML's plain values. Refuses repeated keys, of which the first would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise _error(f"{key.value!r} is there twice", key.start_mark)
                seen.add((key.tag, key.value))
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def _checked(construct: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Returns a constructor that refuses what Python cannot represent or takes long to read."""

    def checked(loader: PlainLoader, node: yaml.Node) -> Any:
        try:
            if len(node.value) > _MAX_NUMBER_CHARS:
                raise ValueError
            return construct(loader, node)
        except (ValueError, OverflowError):
            raise _error(f"this is no {what}", node.start_mark) from None

    return checked


for _tag, _construct, _what in (
    ("int", PlainLoader.construct_yaml_int, "whole number"),
    ("float", PlainLoader.construct_yaml_float, "number"),
    ("timestamp", PlainLoader.construct_yaml_timestamp, "date"),
):
    PlainLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _checked(_construct, _what))


def load_file(path: Path) -> Any:
    """Returns the values of a file. Raises YamlFault, OSError, UnicodeDecodeError."""
    with opened(read_text(path)) as loader:
        return loader.get_single_data()


def read_text(path: Path) -> str:
    """Returns a file's text. Raises YamlFault, OSError, UnicodeDecodeError."""
    with path.open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise YamlFault(f"has more than {MAX_BYTES} bytes", 1)
    return raw.decode("utf-8")


@contextmanager
def opened(text: str) -> Iterator[PlainLoader]:
    """A loader of the text's nodes and values; its errors become YamlFaults. Raises YamlFault."""
    try:
        _check_events(text)
        loader = PlainLoader(text)
        try:
            yield loader
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark else 1
        raise YamlFault(f"not YAML: {exc.problem}"[:_MAX_PROBLEM_CHARS], line) from exc
    except yaml.YAMLError as exc:
        problem = " ".join(str(exc).split())
        raise YamlFault(f"not YAML: {problem}"[:_MAX_PROBLEM_CHARS], 1) from exc


def _check_events(text: str) -> None:
    """Raises YamlFault before anything is built of the text."""
    depth = num_nodes = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise YamlFault("anchors and aliases (& and *) cannot be used here", line)
        num_nodes += isinstance(event, yaml.NodeEvent)
        if num_nodes > MAX_NODES:
            raise YamlFault(f"has more than {MAX_NODES} values", line)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise YamlFault(f"is nested more than {MAX_DEPTH} levels deep", line)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _error(problem: str, mark: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)
