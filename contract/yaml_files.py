"""Reads YAML that an operator has written: plain values, and nodes with their lines."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # types are a separate package


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
                    raise _error(f"{key.value!r} is there twice", key)
                seen.add((key.tag, key.value))
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as exc:  # such as the date 2026-99-99
            raise _error(f"this cannot be read: {exc}", node) from exc


def load_file(path: Path) -> Any:
    """Returns the values of a file. Raises YamlFault, OSError, UnicodeDecodeError."""
    with opened(path.read_text("utf-8")) as loader:
        return loader.get_single_data()


@contextmanager
def opened(text: str) -> Iterator[PlainLoader]:
    """A loader of the text's nodes and values; its errors become YamlFaults. Raises YamlFault."""
    try:
        loader = PlainLoader(text)
        try:
            yield loader
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark else 1
        raise YamlFault(f"not YAML: {exc.problem}", line) from exc
    except yaml.YAMLError as exc:
        raise YamlFault(f"not YAML: {' '.join(str(exc).split())}", 1) from exc


def _error(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
