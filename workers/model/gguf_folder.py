"""Writes the contents of a GGUF file as a folder in Hugging Face layout, as transformers reads them.

    python -m workers.model.gguf_folder FILE NAME FOLDER DTYPE

NAME is what messages call the file. Progress goes to the standard output; a refusal is the last
line of the standard error. Ends when its standard input does.
"""

import math
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from workers.engine.interface import ModelRefused
from workers.model.checkpoint import first_line
from workers.model.gguf_compat import GgufHeader, gguf_architectures, read_gguf_metadata
from workers.model.machine import free_cpu_bytes
from workers.model.weights import load_gguf

_GIB = 2**30
# Beside the weights: torch, transformers and the vocabulary; the largest tensor and its copies in
# float32, as one is dequantised at a time. Measured with SmolLM2: 0.4 GiB and 2.6 copies.
_BASE_BYTES = 2**29
_NUM_COPIES = 3
_SMALL_FILES_BYTES = 2**26  # the tokenizer, on the disk


def write_folder(
    file: Path, folder: Path, dtype: torch.dtype, tell: Callable[[str], None], name: str = ""
) -> None:
    """Writes config.json, generation_config.json, weights, tokenizer and chat template.

    `dtype`: of the weights in the folder. `name`: of the file in messages. The folder then loads to
    the same weights, of the same type, as `from_pretrained(gguf_file=...)`. The end tokens are also
    those that the file names as ends of a turn and of a message. Raises ModelRefused."""
    name = name or str(file)
    header, metadata = _read_header(file, name)
    _check_room(header, folder, dtype, name, tell)
    source, gguf = str(file.parent), {"gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(source, **gguf)
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **gguf)
    except Exception as exc:  # transformers assumes well-formed files
        raise ModelRefused(f"{name} cannot be read: {first_line(exc)}") from exc
    model = load_gguf(file, config, dtype, name)
    if ends := _end_token_ids(metadata):
        model.generation_config.eos_token_id = ends
    tell("writing the folder")
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as exc:  # the formats' own errors, without a common class
        raise ModelRefused(f"the folder of {name} cannot be written: {first_line(exc)}") from exc


def _read_header(file: Path, name: str) -> tuple[Any, dict[str, Any]]:
    """The table of tensors and the metadata, without long lists. Raises ModelRefused."""
    try:
        metadata, _ = read_gguf_metadata(str(file))
        architecture, num_parts = metadata["general.architecture"], metadata.get("split.count", 1)
        if architecture not in (known := gguf_architectures()):
            raise ModelRefused(
                f"{name} is of the architecture {architecture!r}, which transformers does not read "
                f"from GGUF; it reads {', '.join(known)}"
            )
        if num_parts > 1:
            raise ModelRefused(
                f"{name} is one of {num_parts} parts: merge them with llama.cpp's `llama-gguf-split"
                " --merge`"
            )
        header = GgufHeader.from_file(str(file))
        size = file.stat().st_size
        end = max(header.data_start + info.offset + info.nbytes for info in header.tensors)
    except ModelRefused:
        raise
    except Exception as exc:  # a reader for well-formed files
        raise ModelRefused(
            f"{name} is no GGUF file, or a damaged or unfinished one: {first_line(exc)}"
        ) from exc
    if size < end:
        raise ModelRefused(f"{name} is cut off: it has {size} bytes, but its tensors end at {end}")
    return header, metadata


def _check_room(
    header: Any, folder: Path, dtype: torch.dtype, name: str, tell: Callable[[str], None]
) -> None:
    """Tells what memory and disk it takes. Raises ModelRefused if there is less."""
    sizes = [math.prod(info.shape) for info in header.tensors]
    weights = sum(sizes) * dtype.itemsize
    disk = weights + _SMALL_FILES_BYTES
    memory = weights + _NUM_COPIES * max(sizes) * torch.float32.itemsize + _BASE_BYTES
    kind = str(dtype).removeprefix("torch.")
    tell(
        f"reading {name}: {header.architecture}, {sum(sizes) / 1e6:,.0f} million weights, kept as "
        f"{kind} in the cache: {disk / _GIB:.1f} GiB on the disk, once, and up to "
        f"{memory / _GIB:.1f} GiB of memory"
    )
    smaller = "" if dtype.itemsize < 4 else "; --dtype bfloat16 takes about half"
    for what, needed, free in (
        (f"of {folder.parent}", disk, shutil.disk_usage(folder.parent).free),
        ("of memory", memory, free_cpu_bytes()),
    ):
        if free < needed:
            raise ModelRefused(
                f"{name} takes {needed / _GIB:.1f} GiB {what}, where {free / _GIB:.1f} GiB are "
                f"free{smaller}"
            )


def _end_token_ids(metadata: dict[str, Any]) -> list[int]:
    names = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    return sorted({metadata[name] for name in names if name in metadata})


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing is ever written to it
    os._exit(1)


def main() -> int:
    file, name, folder, dtype = sys.argv[1:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        write_folder(
            Path(file),
            Path(folder),
            getattr(torch, dtype),
            lambda text: print(text, flush=True),
            name,
        )
    except ModelRefused as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
