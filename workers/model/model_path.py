"""Checks where a model is, explains what a folder without one is instead, and says how large its
weights are. Imports no torch and no transformers, so that commands can check quickly; the loader
reads the files."""

import math
from contextlib import suppress
from itertools import chain
from pathlib import Path

from workers.engine.interface import ModelRefused
from workers.model.files import DEFAULT_REVISION, ModelFiles
from workers.model.weight_headers import read_tensors, weight_files

_ADAPTER_FILE = "adapter_config.json"
_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER_BYTES = 1024
# Weights that are none in safetensors, by their names, and what they are.
_OTHER_WEIGHTS = {
    "*.gguf": "weights in GGUF format, of which `--model FILE.gguf` makes a folder",
    "*.bin": "pickled weights, which can run code and are never loaded",
    "*.pt*": "pickled weights, which can run code and are never loaded",
    "*.onnx": "weights in ONNX format, which batchway does not read",
    "*.h5": "weights for TensorFlow, which batchway does not read",
    "*.msgpack": "weights for Flax, which batchway does not read",
}


def check_place(model_path: str) -> None:
    """Refuses local paths without a model. Names such as `org/model` belong to the Hub."""
    path = Path(model_path).expanduser()
    if path.is_dir():
        _check_folder(model_path, path)
    elif path.exists():
        others = [reason for pattern, reason in _OTHER_WEIGHTS.items() if path.match(pattern)]
        held = f", with {others[0]}" if others else ""
        raise ModelRefused(f"{model_path} is a file{held}; the model's folder is wanted")
    elif model_path.startswith(("/", ".", "~")) or model_path.count("/") > 1:
        raise ModelRefused(f"there is no folder {model_path}")


def _check_folder(model_path: str, path: Path) -> None:
    if (pointer := _pointer_in(path)) is not None:
        raise ModelRefused(
            f"{pointer} of {model_path} is a pointer of Git LFS and not the file itself: run `git "
            "lfs pull` there, or download the model with `hf download`"
        )
    weights = [file for file in path.glob("*.safetensors") if not file.name.startswith("adapter_")]
    has_config = (path / "config.json").is_file()
    if has_config and weights:
        return
    if (path / _ADAPTER_FILE).is_file() and not weights:
        raise ModelRefused(_adapter_refusal(model_path, path / _ADAPTER_FILE))
    if not has_config:
        raise ModelRefused(f"{model_path} holds no config.json: {_instead_of_config(path)}")
    others = [reason for pattern, reason in _OTHER_WEIGHTS.items() if any(path.glob(pattern))]
    instead = f", but {others[0]}" if others else ": it has no weights at all"
    raise ModelRefused(f"{model_path} holds no weights in safetensors format{instead}")


def _pointer_in(path: Path) -> str | None:
    """The name of a file that the model needs and Git LFS has not fetched."""
    patterns = ["*.json", "*.jinja", "model*.safetensors"]
    patterns += [] if (path / "tokenizer.json").is_file() else ["*.model"]
    for file in sorted(file for pattern in patterns for file in path.glob(pattern)):
        if file.is_file() and file.stat().st_size <= _MAX_POINTER_BYTES:
            with file.open("rb") as opened:
                if opened.read(len(_POINTER)) == _POINTER:
                    return file.name
    return None


def _instead_of_config(path: Path) -> str:
    if (path / "modules.json").is_file():
        return "batchway reads a Transformer from the model's own folder, no sub-folder"
    if (path / "model_index.json").is_file():
        return "its model_index.json is that of a diffusers pipeline, which makes no text"
    if (path / "params.json").is_file():
        return (
            "its params.json is of the maker's own format; take the checkpoint in Hugging Face "
            "format"
        )
    if not any(path.iterdir()):
        return "the folder is empty"
    for pattern, reason in _OTHER_WEIGHTS.items():
        if any(path.glob(pattern)):
            return f"it holds {reason}"
    inner = sorted(file.parent.name for file in path.glob("*/config.json"))
    if inner:
        return f"it is no model folder, but its sub-folder {inner[0]} is"
    return "it is no model folder"


def _adapter_refusal(model_path: str, file: Path) -> str:
    """The refusal of an adapter. `file`: its configuration, which names its base model."""
    base = None
    with suppress(ModelRefused):  # it cannot be read
        base = ModelFiles(model_path, "").read_object(file.name).get("base_model_name_or_path")
    of = f"of {base[:200]} " if isinstance(base, str) and base.isprintable() else ""
    return (
        f"{model_path} is an adapter {of}and no whole model: merge both with peft "
        "(AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(OUT)"
        ", and the tokenizer's save_pretrained(OUT)) and serve OUT"
    )


def check_on_hub(model_path: str, revision: str = DEFAULT_REVISION) -> None:
    """Fetches the configuration of a Hub model, or finds it in the cache; refuses unknown
    models.
    """
    if ModelFiles(model_path, revision).find("config.json") is None:
        raise ModelRefused(
            f"{model_path} has no config.json outside of sub-folders: it is no model, or an "
            "adapter, a pipeline, or in another format; of GGUF, download a file and give its path"
        )


_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CONVERTED = ("F64", "F32", "F16", "BF16")  # types in safetensors; others are loaded as they are


def least_weight_bytes(model_path: str, dtype: str, quantization: str, *, on_gpu: bool) -> int:
    """Bytes that the weights of a folder take at least, once loaded as `dtype` (auto: float32 on a
    CPU, a half type on a GPU); 0 if unknown, as for a model of the Hub."""
    files = ModelFiles(model_path, DEFAULT_REVISION)
    if not files.is_local:
        return 0
    try:
        stored = [read_tensors(files, name).values() for name in weight_files(files)]
    except (OSError, ModelRefused):
        return 0  # the loader says what is wrong
    each = 1 if quantization == "int8" else _BYTES.get(dtype, 2 if on_gpu else 4)
    return sum(
        each * math.prod(tensor.shape)
        if tensor.dtype in _CONVERTED
        else tensor.data_offsets[1] - tensor.data_offsets[0]
        for tensor in chain.from_iterable(stored)
    )
