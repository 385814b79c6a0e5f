"""Builds the CPU kernels with the local compiler, once per machine, and loads them.

Without a compiler the engine uses torch alone: slower, with the same results. A library is stored
under a hash of everything it was built from.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from enum import StrEnum
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("kernels.cpp")
_HEADERS = (
    *("attention.h", "thread_pool.h", "layers.h", "linear.h"),
    *("rows.h", "turn.h", "vectors.h", "widen.h"),
)
_FILES = (_SOURCE, *(_SOURCE.with_name(name) for name in _HEADERS))
_FLAGS = ("-O3", "-fno-math-errno", "-std=c++20", "-shared", "-fPIC", "-pthread")
_BUILD_TIMEOUT_S = 300.0
_DTYPES = ("float32", "bfloat16")

_P, _I, _F, _N = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "attend": (_P, _I, _P, _P, _I, _P, _P, _P, _I, _I, _I, _I, _F, _F, _I, _P),
    "rms_norm": (_P, _P, _P, _I, _I, _F),
    "rotate_and_keep": (_P, _I, _I, _I, _I, _P, _P, _I, _P, _P, _F, _P, _P, _P),
    "silu_gate": (_P, _P, _I, _I),
    "argmax": (_P, _P, _I, _I),
    "linear": (_P, _I, _P, _P, _P, _P, _I, _I, _I, _N, _P, _F, _P),
    "run_layers": (_P, _I, _P, _P),
}


class CannotBuild(Exception):
    """There is no compiler, or it failed. The message is one sentence."""


class Isa(StrEnum):
    """Instruction sets that the kernels can be built for, narrowest first."""

    AVX2 = "avx2"
    AVX512 = "avx512"  # without BF16 and VBMI
    NATIVE = "native"  # everything the processor supports


# The compiler's name, and the macro that shows whether the processor has it.
_NARROWER = {Isa.AVX2: ("x86-64-v3", "__AVX2__"), Isa.AVX512: ("x86-64-v4", "__AVX512VL__")}


def supported_isas() -> tuple[Isa, ...]:
    """Instruction sets of this processor, narrowest first, NATIVE last. Raises CannotBuild."""
    macros = _macros(_compiler(), _march(Isa.NATIVE))
    narrower = (isa for isa, (_, macro) in _NARROWER.items() if f"#define {macro} " in macros)
    return (*narrower, Isa.NATIVE)


@cache
def load_library(isa: Isa = Isa.NATIVE) -> ctypes.CDLL:
    """Loads the kernels, and builds them if that was not done before. Raises CannotBuild."""
    target = library_path(isa)
    if not target.exists():
        _build(_compiler(), (*_FLAGS, _march(isa)), target)
    try:
        library = ctypes.CDLL(str(target))
    except OSError as exc:
        raise CannotBuild(f"{target} cannot be loaded: {exc}") from exc
    for name, arguments in _ARGUMENTS.items():
        for dtype in _DTYPES:
            function = getattr(library, f"{name}_{dtype}")
            function.argtypes, function.restype = arguments, None
    library.looks_up_bytes.argtypes, library.looks_up_bytes.restype = (), _N
    library.set_num_threads.argtypes, library.set_num_threads.restype = (_N,), None
    return library


def library_path(isa: Isa) -> Path:
    """Path of the library; it depends on source, compiler, processor and instruction set. Raises
    CannotBuild."""
    if isa not in supported_isas():
        raise CannotBuild(f"this processor has no {isa}")
    compiler, flags = _compiler(), (*_FLAGS, _march(isa))
    key = [
        *(file.read_bytes() for file in _FILES),
        *map(str.encode, (*flags, _macros(compiler, _march(isa)))),
    ]
    digest = hashlib.sha256(b"\0".join(key)).hexdigest()[:16]
    return _cache_folder() / f"kernels-{digest}.so"


def _compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or shutil.which(compiler) is None:
        raise CannotBuild("no C++ compiler is installed; with g++ or clang++ it is faster")
    return compiler


def _march(isa: Isa) -> str:
    return f"-march={_NARROWER[isa][0] if isa in _NARROWER else 'native'}"


@cache
def _macros(compiler: str, march: str) -> str:
    """The compiler's macros for an instruction set, including its version."""
    probe = [compiler, march, "-dM", "-E", "-x", "c++", "/dev/null"]
    try:
        done = subprocess.run(  # noqa: S603 - the operator's compiler
            probe, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise CannotBuild(f"{compiler} does not run: {exc}") from exc
    return done.stdout


def _cache_folder() -> Path:
    """A private folder, because code is loaded from it."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "batchway"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise CannotBuild(f"{folder} cannot be written to: {exc.strerror}") from exc
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise CannotBuild(f"others may write to {folder}, so no code is loaded from it")
    return folder


def _build(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    """Builds to a temporary name: two workers may build at once."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [compiler, *flags, str(_SOURCE), "-o", str(built)]
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
