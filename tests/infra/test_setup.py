"""scripts/setup if something is missing: one sentence says what, and the next run repeats setup.

`tests.first_run` runs it in empty clones.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of a clone that scripts/setup reads."""
    folder = tmp_path / "clone"
    (folder / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "scripts/setup", "scripts/environment.py"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def clone_with_pip(clone: Path) -> Path:
    """A clone whose .venv has only the pip of the Python that runs the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    [site] = (clone / ".venv" / "lib").glob("*/site-packages")
    [own] = (Path(sys.prefix) / "lib").glob("*/site-packages")
    (site / "pip").symlink_to(own / "pip")
    return clone


def failed_setup(clone: Path, **environ: str) -> str:
    """The error of scripts/setup, with the given pip settings only."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        ["bash", str(clone / "scripts" / "setup")],
        env=base | {"PIP_CONFIG_FILE": os.devnull} | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert not (clone / ".venv" / "batchway-setup").exists()
    assert len(done.stderr.splitlines()) <= 4, done.stderr
    return done.stderr.splitlines()[-1]


def test_an_absent_package_index_is_an_error(clone_with_pip: Path) -> None:
    """It says what to check, and where the whole log is."""
    message = failed_setup(clone_with_pip, PIP_INDEX_URL=NOWHERE, PIP_RETRIES="1")

    assert message.startswith("scripts/setup: torch==2.13.0: pip cannot reach a package index.")
    assert message.endswith(f"Log: {clone_with_pip}/.venv/setup.log")
    assert "Connection refused" in (clone_with_pip / ".venv" / "setup.log").read_text()


def test_errors_of_pip_are_quoted(clone_with_pip: Path) -> None:
    """Its line with the error."""
    message = failed_setup(clone_with_pip, PIP_NO_INDEX="1", BATCHWAY_TORCH="torch==0.0.1")

    assert "torch==0.0.1: ERROR: No matching distribution found for torch==0.0.1." in message


def test_an_old_python_is_an_error(clone: Path, tmp_path: Path) -> None:
    """It names its version and the required one."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname"):
        (programs / name).symlink_to(shutil.which(name) or name)
    old = programs / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 || exit 1\n')
    old.chmod(0o755)

    message = failed_setup(clone, PATH=str(programs))

    assert message == "scripts/setup: batchway needs Python 3.11 or later; found: Python 3.9.2."


def test_an_unwritable_folder_is_an_error(clone: Path) -> None:
    """Before any download."""
    (clone / ".venv").write_text("in the way")

    message = failed_setup(clone)

    assert f"cannot write to {clone}/.venv" in message
