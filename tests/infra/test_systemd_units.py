"""The units of docs/deployment.md: systemd accepts them, and their commands exist."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.parser import build_parser
from tests.markdown import code_blocks

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "deployment.md"
PROGRAM = "/opt/batchway/.venv/bin/batchway"


def units() -> dict[str, str]:
    """The page's units, by file name."""
    found = {}
    for block in code_blocks(PAGE.read_text()):
        if block.language == "ini":
            first, _, rest = block.text.partition("\n")
            name = re.match(r"# /etc/systemd/system/(\S+)", first)
            assert name is not None, first
            found[name[1]] = rest
    return found


UNITS = units()


def service(name: str) -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNITS[name])
    return parser["Service"]


def test_every_part_has_a_unit() -> None:
    """And the page starts all of them."""
    parts = {"batchway-gateway", "batchway-worker@", "batchway-callbacks"}
    assert {name.removesuffix(".service") for name in UNITS} == parts
    [line] = re.findall(r"^sudo systemctl enable --now (.*)$", PAGE.read_text(), re.MULTILINE)
    assert {re.sub(r"@\d+$", "@", name) for name in line.split()} == parts


@pytest.mark.parametrize("name", sorted(UNITS))
def test_a_unit_runs_a_command_that_exists(name: str) -> None:
    """As an unprivileged user. Its stop timeout exceeds the drain."""
    program, *arguments = shlex.split(service(name)["ExecStart"])
    options = build_parser().parse_args(arguments)
    assert program == PROGRAM
    assert options.command == re.sub(r"batchway-|@?\.service", "", name)
    assert service(name)["User"] == "batchway"
    assert int(service(name)["TimeoutStopSec"]) > (getattr(options, "drain_s", None) or 0)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
@pytest.mark.parametrize("name", sorted(UNITS))
def test_systemd_accepts_a_unit(name: str, tmp_path: Path) -> None:
    """`systemd-analyze verify` prints nothing. The program is replaced by an installed one."""
    path = tmp_path / name.replace("@", "@0")
    path.write_text(UNITS[name].replace(PROGRAM, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)],
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    assert not lines
    assert done.returncode == 0, done.stderr
