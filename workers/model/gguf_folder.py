"""Writes a GGUF file as a folder in Hugging Face layout, as transformers reads it.

    python -m workers.model.gguf_folder FILE NAME FOLDER DTYPE

NAME is what messages call the file. A refusal is the last line of the standard error, as Python
writes an exception.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from workers.engine.interface import ModelRefused
from workers.model.checkpoint import first_line
from workers.model.gguf_compat import Header, gguf_architectures, read_header
from workers.model.machine import free_cpu_bytes
from workers.model.transformers_compat import ROPE_INIT_FUNCTIONS

_GIB = 2**30
# Beside the weights: torch, transformers and the vocabulary; the largest tensor and its copies in
# float32, as one is dequantised at a time. With SmolLM2 0.4 GiB and 2.6 copies were measured.
_BASE_BYTES = 2**29
_NUM_COPIES = 3
_SMALL_FILES_BYTES = 2**26  # the tokenizer, on the disk


def write_folder(file: Path, folder: Path, dtype: torch.dtype, name: str) -> None:
    """Writes config.json, generation_config.json, weights of `dtype`, tokenizer and chat template.

    `name`: of the file in messages. The folder loads to the same weights as `from_pretrained` with
    the file and this type. Beyond what transformers reads, the ends of a turn and of a message are
    end tokens too, and Llama 3's rotary scaling is kept. Raises ModelRefused."""
    try:
        header = read_header(file)
        architecture = header.metadata["general.architecture"]
    except Exception as exc:  # a reader for well-formed files
        raise ModelRefused(f"{name} is damaged, or no GGUF file: {first_line(exc)}") from exc
    _check_contents(header, architecture, name)
    _check_room(header, folder.parent, dtype, name)
    try:
        model, tokenizer = _read(file, header, dtype)
        named = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
        if ends := {header.metadata[key] for key in named if key in header.metadata}:
            model.generation_config.eos_token_id = sorted(ends)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as exc:  # transformers assumes well-formed files, and room on the disk
        raise ModelRefused(f"{name} cannot be read into a folder: {first_line(exc)}") from exc


def _check_contents(header: Header, architecture: Any, name: str) -> None:
    """Refuses what transformers does not read, or not whole."""
    known = gguf_architectures()
    if architecture not in known:
        raise ModelRefused(
            f"{name} is of the architecture {architecture!r}, which transformers does not read "
            f"from GGUF; it reads {', '.join(known)}"
        )
    if header.metadata.get("split.count", 1) != 1:
        raise ModelRefused(f"{name} is one of several parts: `llama-gguf-split --merge` joins them")
    scaling = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_factors_long.weight" in header.data:
        raise ModelRefused(
            f"{name} scales its rotary embedding, which transformers does not read from GGUF: take "
            "the model in Hugging Face layout"
        )


def _check_room(header: Header, cache: Path, dtype: torch.dtype, name: str) -> None:
    """Tells what disk and memory it takes. Raises ModelRefused if there is less."""
    sizes = header.num_weights.values()
    disk = sum(sizes) * dtype.itemsize + _SMALL_FILES_BYTES
    memory = disk + _NUM_COPIES * max(sizes, default=0) * torch.float32.itemsize + _BASE_BYTES
    takes = f"{disk / _GIB:.1f} GiB on the disk as {str(dtype).removeprefix('torch.')}"
    takes += f" and up to {memory / _GIB:.1f} GiB of memory"
    print(f"reading {name} into the cache, once: {takes}", flush=True)
    free_disk, free_memory = shutil.disk_usage(cache).free, free_cpu_bytes()
    if free_disk < disk or free_memory < memory:
        raise ModelRefused(
            f"{name} takes {takes}; {free_disk / _GIB:.1f} GiB of the disk and "
            f"{free_memory / _GIB:.1f} GiB of memory are free"
        )


def _read(file: Path, header: Header, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model on the CPU, and its tokenizer. Raises ValueError and transformers' own errors."""
    source, gguf = str(file.parent), {"gguf_file": file.name}
    config = AutoConfig.from_pretrained(source, **gguf)
    tokenizer = AutoTokenizer.from_pretrained(source, **gguf)
    _keep_rope_scaling(config, header)
    whole: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True), **gguf}
    whole |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # refused below
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype, **whole)
    model, info = loaded
    missing = sorted([*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])])
    if missing:
        raise ValueError(f"{len(missing)} weights are missing or misshapen, such as {missing[0]}")
    return model, tokenizer


def _keep_rope_scaling(config: Any, header: Header) -> None:
    """Sets the scaling that llama.cpp keeps as a divisor of each rotary frequency, which
    transformers leaves out. Raises ValueError if it is not that of Llama 3.1 to 3.3."""
    if (data := header.data.get("rope_freqs.weight")) is None:
        return
    divisors = torch.from_numpy(data.view("<f4").copy())
    exponents = torch.arange(len(divisors)) / len(divisors)
    plain = config.rope_parameters["rope_theta"] ** -exponents
    config.rope_parameters |= {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if not torch.allclose(scaled * divisors, plain, rtol=1e-3):
        raise ValueError("its rotary frequencies are scaled in a way other than Llama 3's")


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]), Path(sys.argv[3]), getattr(torch, sys.argv[4]), sys.argv[2])
