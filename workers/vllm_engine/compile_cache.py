"""Where what vLLM compiles for a model is kept: beside its folder, or in batchway's cache. Code is
loaded from there, so it belongs to this user alone, and is no part of what comes with a model."""

import os
from collections.abc import MutableMapping
from pathlib import Path

_ROOT = "VLLM_CACHE_ROOT"
_OTHERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def use_compile_cache(model_path: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables by which vLLM, torch and Triton find their caches: `.NAME.vllm` beside a
    folder NAME, or where that cannot be made. Variables that are set stay; libraries' defaults
    where nothing can be written."""
    model = Path(model_path).expanduser().resolve()
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchway"
    beside = [model.with_name(f".{model.name}.vllm")] if model.is_dir() else []
    folder = next(filter(_is_ours, (*beside, cache / "vllm")), None)
    if folder is not None and _ROOT not in environ:
        environ[_ROOT] = str(folder)
        for variable, name in _OTHERS.items():
            environ.setdefault(variable, str(folder / name))


def _is_ours(folder: Path) -> bool:
    """Whether the folder, made if it is not there, can be written by this user alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError:
        return False
    is_private = state.st_uid == os.getuid() and not state.st_mode & 0o022
    return is_private and os.access(folder, os.W_OK)
