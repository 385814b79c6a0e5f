"""YAML of operators: whichever file it is in, a fault is named with its line."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from contract.yaml_files import YamlFault, load_file
from gateway.runners.flows.definitions import FlowError, load_flows
from infra.fleet import read_fleet
from infra.parser import build_parser
from infra.preconditions import UsageError
from workers.configuration import ConfigurationError, load

READERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "models.yaml": (load_flows, FlowError),
    "fleet.yaml": (lambda path: read_fleet(path, build_parser().parse_args(["up"])), UsageError),
    "batching.yaml": (load, ConfigurationError),
}

# Each with the line of its fault.
WRONG = {
    "no date": ("a: 1\nb: 2026-99-99", 2),
    "a key that is there twice": ("a: {b: 1,\n b: 2}", 2),
    "an open list": ("a: 1\nb: [1,", 2),
    "a control character": ("a: \x00", 1),
    "an alias of nothing": ("a: 1\nb: *c", 2),
    "code": ("a: !!python/object/apply:os.system [ls]", 1),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_fault_is_named_with_its_line(tmp_path: Path, case: str) -> None:
    text, line = WRONG[case]
    path = tmp_path / "any.yaml"
    path.write_text(text)
    with pytest.raises(YamlFault) as caught:
        load_file(path)
    assert caught.value.line == line


@pytest.mark.parametrize("name", READERS)
def test_every_reader_names_file_and_line(tmp_path: Path, name: str) -> None:
    """With its own error."""
    read, error = READERS[name]
    path = tmp_path / name
    path.write_text("# why\na: 1\nb: [1,")
    with pytest.raises(error) as caught:
        read(path)
    assert re.match(rf".*{name}:(?: line )?\d+: not YAML: ", str(caught.value)), caught.value


def test_plain_values_are_read(tmp_path: Path) -> None:
    path = tmp_path / "any.yaml"
    path.write_text("a: 2026-01-02\nb: 0x10\nc: 1_000\nd: .5\ne: 1e3\nf: 12:30")
    assert [type(value).__name__ for value in load_file(path).values()] == [
        *("date", "int", "int", "float", "str", "int")
    ]
