"""The units in examples/systemd: systemd accepts them, and their commands exist."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.options import GATEWAY_DRAIN_S, LIFELINE_GRACE_S
from infra.parser import build_parser

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "deployment.md"
PROGRAM = "/opt/batchway/.venv/bin/batchway"


UNITS = {path.name: path.read_text() for path in (ROOT / "examples" / "systemd").iterdir()}
PARTS = sorted(name for name in UNITS if "health" not in name)


def service(name: str) -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNITS[name])
    return parser["Service"]


def test_every_part_has_a_unit() -> None:
    parts = {"batchway-gateway", "batchway-worker@", "batchway-callbacks"}
    assert {name.removesuffix(".service") for name in PARTS} == parts
    [line] = re.findall(r"^sudo systemctl enable --now (.*)$", PAGE.read_text(), re.MULTILINE)
    started = {re.sub(r"@\d+$", "@", name) for name in line.split()}
    assert started == parts | {"batchway-health.timer"}


@pytest.mark.parametrize("name", PARTS)
def test_a_unit_may_write_the_objects(name: str) -> None:
    """The folder that the page's variables name; it stops before Redis does."""
    [store] = re.findall(r"BATCHWAY_OBJECT_STORE=(\S+)", PAGE.read_text())
    assert Path(store).is_relative_to(service(name)["ReadWritePaths"])
    [after] = re.findall(r"^After=(.*)$", UNITS[name], re.MULTILINE)
    assert "redis-server.service" in after.split()


@pytest.mark.parametrize("name", PARTS)
def test_a_unit_runs_a_command_that_exists(name: str) -> None:
    """As an unprivileged user. Its stop timeout exceeds the drain."""
    program, *arguments = shlex.split(service(name)["ExecStart"])
    options = build_parser().parse_args(arguments)
    assert program == PROGRAM
    assert options.command == re.sub(r"batchway-|@?\.service", "", name)
    assert service(name)["User"] == "batchway"
    assert int(service(name)["TimeoutStopSec"]) > (getattr(options, "drain_s", None) or 0)


def test_the_gateway_s_unit_may_run_several() -> None:
    """The page names the variable that its command reads. Only the process that started them gets
    SIGTERM, so that none is restarted while all end."""
    assert re.search(r"`BATCHWAY_GATEWAYS=\d+` in `/etc/batchway/env`", PAGE.read_text())
    unit = service("batchway-gateway.service")
    assert "--gateways" not in unit["ExecStart"]
    assert unit["KillMode"] == "mixed"
    assert int(unit["TimeoutStopSec"]) >= GATEWAY_DRAIN_S + 2 * LIFELINE_GRACE_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
@pytest.mark.parametrize("name", sorted(UNITS))
def test_systemd_accepts_a_unit(name: str, tmp_path: Path) -> None:
    """`systemd-analyze verify` prints nothing. The program is replaced by an installed one."""
    for each, text in UNITS.items():  # a timer's service, too
        each = each.replace("@", "@0")
        (tmp_path / each).write_text(text.replace(PROGRAM, sys.executable))
    path = tmp_path / name.replace("@", "@0")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)],
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    assert not lines
    assert done.returncode == 0, done.stderr
