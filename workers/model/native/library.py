"""Builds the CPU kernels with the compiler that is there, once for each machine, and loads them.

Where there is no compiler the engine runs on torch alone, slower and equally right. Nothing is
downloaded, and what was built is found again by the hash of all that went into it.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("kernels.cpp")
_HEADERS = ("attention.h", "layers.h", "linear.h", "rows.h", "turn.h", "vectors.h", "widen.h")
_FILES = (_SOURCE, *(_SOURCE.with_name(name) for name in _HEADERS))
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c++17", "-shared", "-fPIC")
_BUILD_TIMEOUT_S = 300.0
_DTYPES = ("float32", "bfloat16")

_P, _I, _F, _N = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "attend": (_P, _I, _P, _P, _I, _P, _P, _P, _I, _I, _I, _I, _F, _F, _I, _P, _N),
    "rms_norm": (_P, _P, _P, _I, _I, _F, _N),
    "rotate_and_keep": (_P, _I, _I, _I, _I, _P, _P, _I, _P, _P, _F, _P, _P, _P, _N),
    "silu_gate": (_P, _P, _I, _I, _N),
    "likeliest": (_P, _P, _I, _I, _N),
    "linear": (_P, _I, _P, _P, _P, _P, _I, _I, _I, _N, _P, _F, _P, _N),
    "run_layers": (_P, _I, _P, _P, _N),
}


class CannotBuild(Exception):
    """There is no compiler, or it refused. The message is one sentence."""


@cache
def load_library() -> ctypes.CDLL:
    """The kernels, built now unless they were before. Raises CannotBuild."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or shutil.which(compiler) is None:
        raise CannotBuild("no C++ compiler is installed; with g++ or clang++ it is faster")
    openmp = _openmp_flags()
    key = [
        *(file.read_bytes() for file in _FILES),
        *map(str.encode, (*_FLAGS, *openmp, _identity(compiler))),
    ]
    digest = hashlib.sha256(b"\0".join(key)).hexdigest()[:16]
    folder = _cache_folder()
    target = folder / f"kernels-{digest}.so"
    if not target.exists():
        _build(compiler, openmp, target)
    try:
        library = ctypes.CDLL(str(target))
    except OSError as exc:
        raise CannotBuild(f"{target} cannot be loaded: {exc}") from exc
    for name, arguments in _ARGUMENTS.items():
        for dtype in _DTYPES:
            function = getattr(library, f"{name}_{dtype}")
            function.argtypes, function.restype = arguments, None
    for name in ("multiplies_well", "widens_well"):
        function = getattr(library, name)
        function.argtypes, function.restype = (), _N
    return library


def _openmp_flags() -> tuple[str, ...]:
    """Links torch's own OpenMP: a second one would keep a second pool of threads beside it."""
    bundled = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    bundled += sorted(Path(torch.__file__).parent.parent.glob("torch.libs/libgomp*.so*"))
    if not bundled:
        return ("-fopenmp",) if platform.system() == "Linux" else ()
    return ("-fopenmp", str(bundled[0]))


def _identity(compiler: str) -> str:
    """What `-march=native` and the compiler's version come to here."""
    probe = [compiler, "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    try:
        said = subprocess.run(  # noqa: S603 - the operator's compiler
            probe, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise CannotBuild(f"{compiler} does not run: {exc}") from exc
    return said.stdout


def _cache_folder() -> Path:
    """Ours alone: code is loaded from it."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "batchway"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise CannotBuild(f"{folder} cannot be written to: {exc.strerror}") from exc
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise CannotBuild(f"others may write to {folder}, so no code is loaded from it")
    return folder


def _build(compiler: str, openmp: tuple[str, ...], target: Path) -> None:
    """Under a name of its own first: two workers may build at once."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [compiler, *_FLAGS, str(_SOURCE), *openmp, "-o", str(built)]
        try:
            ran = subprocess.run(  # noqa: S603
                command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S
            )
        except (OSError, subprocess.SubprocessError) as exc:
            raise CannotBuild(f"{compiler} does not run: {exc}") from exc
        if ran.returncode != 0:
            lines = [line for line in ran.stderr.splitlines() if "error" in line]
            raise CannotBuild(f"{compiler} refused the kernels: {(lines or ['no reason'])[0]}")
        built.replace(target)
