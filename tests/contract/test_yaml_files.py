"""YAML of operators: whichever file it is in, what would take for ever is refused by its line."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from contract import yaml_files
from contract.yaml_files import MAX_BYTES, MAX_DEPTH, MAX_NODES, YamlFault, load_file
from gateway.runners.flows.definitions import FlowError, load_flows
from infra.fleet import read_fleet
from infra.parser import build_parser
from infra.preconditions import UsageError
from workers.configuration import ConfigurationError, load

PACKAGES = Path(yaml_files.__file__).parent.parent
READERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "models.yaml": (load_flows, FlowError),
    "fleet.yaml": (lambda path: read_fleet(path, build_parser().parse_args(["up"])), UsageError),
    "batching.yaml": (load, ConfigurationError),
}


def bomb(rng: random.Random) -> str:
    """Nested aliases: of lists or mappings, of some depth and width, in either style."""
    width, depth = rng.randint(2, 12), rng.randint(2, 9)
    lines = []
    for level in range(depth):
        inner = [f"*a{level - 1}" if level else "x"] * width
        if rng.random() < 0.5:
            value = f"[{', '.join(inner)}]"
        else:
            value = "{" + ", ".join(f"k{n}: {each}" for n, each in enumerate(inner)) + "}"
        lines.append(f"a{level}: &a{level} {value}")
    return "\n".join(lines)


# Each with the line of its fault.
HOSTILE = {
    "an anchor": ("a: 1\nb: &b 1", 2),
    "an anchor of a key": ("&a b: 1", 1),
    "an alias": ("a: 1\n\nb: *a", 3),
    "an alias of a key": ("*a : 1", 1),
    "a merged alias": ("a:\n  <<: *a", 2),
    "a value that holds itself": ("a: &a [*a]", 1),
    "deep lists": ("a:\n  " + "[" * 100_000, 2),
    "deep mappings": ("a: " + "{b: " * 50_000, 1),
    "deep blocks": ("- " * 50_000 + "a", 1),
    "many values": ("a: [" + "1," * (MAX_NODES + 1) + "]", 1),
    "many bytes": ("# " + "x" * MAX_BYTES, 1),
    "a long number": ("a: 1\nb: " + "9" * 100_000, 2),
    "a number to the base of sixty": ("a: " + "1:" * 100_000 + "1", 1),
    "a fraction to the base of sixty": ("a: " + "1:" * 100_000 + "1.5", 1),
    "no date": ("a: 2026-99-99", 1),
    "a key that is there twice": ("a: {b: 1,\n b: 2}", 2),
    "code": ("a: !!python/object/apply:os.system [ls]", 1),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_would_take_for_ever_is_refused_by_its_line(tmp_path: Path, case: str) -> None:
    """Whatever keys it is under."""
    text, line = HOSTILE[case]
    path = tmp_path / "any.yaml"
    path.write_text(text)

    with pytest.raises(YamlFault) as caught:
        load_file(path)

    assert caught.value.line == line
    assert len(str(caught.value)) <= 200, "it quotes little of the text"


@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_nested_aliases(tmp_path: Path, name: str) -> None:
    """Naming file and line, before it builds anything of them."""
    read, error = READERS[name]
    path, rng = tmp_path / name, random.Random(1)
    for _ in range(100):
        num_comments = rng.randrange(5)
        path.write_text("# why\n" * num_comments + bomb(rng))
        with pytest.raises(error) as caught:
            read(path)
        place = re.match(rf".*{name}:(?: line )?(\d+): anchors and aliases", str(caught.value))
        assert place, str(caught.value)
        assert int(place[1]) == num_comments + 1


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("case", ["deep lists", "many bytes", "many values", "a long number"])
def test_every_reader_refuses_what_is_too_large(tmp_path: Path, name: str, case: str) -> None:
    """With its own error."""
    read, error = READERS[name]
    path = tmp_path / name
    path.write_text(HOSTILE[case][0])

    with pytest.raises(error, match=name):
        read(path)


def test_what_is_within_the_limits_is_read(tmp_path: Path) -> None:
    """The deepest, and the most values."""
    path = tmp_path / "any.yaml"
    path.write_text("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert isinstance(load_file(path), list)
    path.write_text("[" + "1, " * (MAX_NODES - 1) + "]")
    assert len(load_file(path)) == MAX_NODES - 1
    path.write_text("a: 2026-01-02\nb: 0x10\nc: 1_000\nd: .5\ne: 1e3\nf: 12:30")
    assert [type(value).__name__ for value in load_file(path).values()] == [
        *("date", "int", "int", "float", "str", "int")
    ]


def test_no_other_module_reads_yaml() -> None:
    """PyYAML's own loaders follow aliases. The template is no one else's, and has its own tags."""
    loads = re.compile(r"\byaml\.(?:safe_|full_|unsafe_)?(?:load|compose|parse)|yaml\.\w*Loader\(")
    found = {
        str(path.relative_to(PACKAGES))
        for package in ("contract", "gateway", "workers", "infra", "bench", "training")
        for path in (PACKAGES / package).rglob("*.py")
        if loads.search(path.read_text())
    }
    assert found == {"contract/yaml_files.py", "infra/aws/parameters.py"}
