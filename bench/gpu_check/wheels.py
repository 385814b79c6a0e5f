"""The packages that a machine with torch, Triton and transformers lacks: carried as wheels.

`python -m bench.gpu_check.wheels` exits with 0 if this Python can run the check. Uses only the
standard library.
"""

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".wheels"
PRESENT = ("torch", "transformers", "triton")
_EXTRAS = ("gateway", "callbacks", "embedded-redis")  # what `batchway up` needs besides
# pip compares the platform's name exactly, so all of glibc's versions are named.
_GLIBC = range(17, 40)


def lacking() -> list[str]:
    """Returns what prevents this Python from running the check, one reason each."""
    found = []
    for name in PRESENT:
        wanted = minimum(name)
        if importlib.util.find_spec(name) is None:
            found.append(f"no {name}")
        elif _numbers(have := importlib.metadata.version(name)) < _numbers(wanted):
            found.append(f"{name} {have}, needed is {wanted}")
    if missing() and not any(FOLDER.glob("*.whl")):
        found.append(f"no {', '.join(missing())}, and no wheels in {FOLDER.name}")
    return found


def carried() -> list[str]:
    """Returns the project's requirements that are carried, with what they need in turn."""
    project = _project()
    extras = project["optional-dependencies"]
    every = [*project["dependencies"], *(text for name in _EXTRAS for text in extras[name])]
    return [text.partition(";")[0].strip() for text in every]


def missing() -> list[str]:
    """Returns those of the carried packages that this Python does not have itself."""
    return [name for name in map(_name, carried()) if not _has(name)]


def unpack(target: Path) -> None:
    """Unpacks those wheels whose packages this Python does not have; they were downloaded for one
    version of it."""
    for wheel in sorted(FOLDER.glob("*.whl")):
        if _has(wheel.name.partition("-")[0]):
            continue
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                path = Path(archive.extract(member, target))
                path.chmod(path.stat().st_mode | (member.external_attr >> 16) & 0o111)


def download(python_version: str, folder: Path = FOLDER) -> int:
    """Replaces the wheels by those for this version of Python ("3.12") on Linux and this kind of
    processor; returns pip's exit status."""
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [f"--platform=manylinux_2_{n}_{platform.machine()}" for n in reversed(_GLIBC)]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"),
        *("--implementation=cp", f"--python-version={python_version}", f"--dest={folder}"),
        *(*platforms, f"--platform=manylinux2014_{platform.machine()}"),
        *carried(),
    ]
    return subprocess.run(command).returncode  # noqa: S603  # our own arguments


def minimum(name: str) -> str:
    """The lowest version of a package that the project supports; "0": it names none."""
    found = re.search(r">=([\d.]+)", _requirement(name))
    return found[1] if found else "0"


def _requirement(name: str) -> str:
    """The project's requirement of a worker's or developer's package, as "torch>=2.11,<3"."""
    extras = _project()["optional-dependencies"]
    every: list[str] = [*extras["worker"], *extras["dev"]]
    return next(text.partition(";")[0].strip() for text in every if _name(text) == name)


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def _name(requirement: str) -> str:
    return re.sub(r"[<>=\[;].*", "", requirement)


def _has(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Converts 2.11.0+cu130 to (2, 11, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def main() -> int:
    found = lacking()
    if found:
        print(f"gpu-check: this python3 has {'; '.join(found)}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
