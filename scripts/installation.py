"""Checks an installed wheel of batchway: its version, its command, its packages and their types.

    PYTHON -I scripts/installation.py      PYTHON: of the environment where it is installed

`-I` keeps the repository's own packages out. Uses only the standard library and batchway.
"""

import importlib
import subprocess
import sys
import tomllib
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Prints the output of `batchway --version`, and the packages; exits with the first fault."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    expected = f"batchway {project['project']['version']}"
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    command = Path(sys.executable).parent / "batchway"
    printed = subprocess.run([command, "--version"], stdout=subprocess.PIPE, text=True, check=True)
    for found in (printed.stdout.strip(), f"batchway {version('batchway')}"):
        if found != expected:
            sys.exit(f"{found!r} is installed, not {expected!r}")
    for name in packages:
        folder = files(importlib.import_module(name))
        if folder == ROOT / name:
            sys.exit(f"{name} comes from the repository, not from the wheel")
        if not (folder / "py.typed").is_file():
            sys.exit(f"{name} has no py.typed")
    print(f"{expected}: {', '.join(packages)}")


if __name__ == "__main__":
    main()
