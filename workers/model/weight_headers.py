"""Reads the headers of a folder's weights, by the library that reads the weights, and compares them
with its index and its configuration. Imports no torch."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from workers.engine.interface import ModelRefused
from workers.model.files import ModelFiles

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")
# Families whose layers are all alike and have the matrices below; others may differ by layer.
_UNIFORM = {
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "cohere", "granite"),
    *("olmo2", "olmo3", "smollm3", "seed_oss"),
}
_OWN_HEAD_DIM = ("llama", "mistral", "qwen2")  # hidden_size / num_attention_heads without one
# The last parts of a matrix's name: the sizes whose products are its rows and columns.
_HEADS, _KV_HEADS = ("num_attention_heads", "head_dim"), ("num_key_value_heads", "head_dim")
_HIDDEN, _INTERMEDIATE = ("hidden_size",), ("intermediate_size",)
_SHAPES = {
    "self_attn.q_proj": (_HEADS, _HIDDEN),
    "self_attn.k_proj": (_KV_HEADS, _HIDDEN),
    "self_attn.v_proj": (_KV_HEADS, _HIDDEN),
    "self_attn.o_proj": (_HIDDEN, _HEADS),
    "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
    "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
    "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
    "model.embed_tokens": (("vocab_size",), _HIDDEN),
    "lm_head": (("vocab_size",), _HIDDEN),
}
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|embed_in|word_embeddings|embeddings)\.weight$"
)


def check_weights(files: ModelFiles, raw: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Refuses weights of a folder that are not all there, damaged, or of other sizes than
    config.json says. `raw`: its content; `text`: that of a text model within it, or empty. Raises
    ModelRefused."""
    path, config = files.model_path, {**raw, **text}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in weight_files(files):
        shapes |= _shapes_in(files, name)
    indexed = {} if files.find(_SINGLE) else files.read_object(INDEX)["weight_map"]
    if missing := sorted(indexed.keys() - shapes.keys()):
        raise ModelRefused(
            f"{INDEX} of {path} names {missing[0]}, which none of its files holds: they belong to "
            "different downloads"
        )
    layers = [int(found[1]) for name in shapes for found in _LAYER.finditer(name)]
    num_layers = config.get("num_hidden_layers")
    if layers and isinstance(num_layers, int) and max(layers) + 1 < num_layers:
        raise ModelRefused(
            f"config.json of {path} has num_hidden_layers {num_layers}, but the weights are those "
            f"of {max(layers) + 1} layers"
        )
    if not text and raw["model_type"] in _UNIFORM:
        _check_uniform(path, raw, shapes)
    _check_vocabulary(path, config, shapes)


def weight_files(files: ModelFiles) -> list[str]:
    """The names of the files that transformers reads. Raises ModelRefused."""
    path = files.model_path
    if files.find(_SINGLE) is not None:
        return [_SINGLE]
    if files.find(INDEX) is None:
        names = sorted(file.name for file in files.folder.glob("*.safetensors"))
        held = names[0] if names else "no weights"
        raise ModelRefused(
            f"{path} holds {held}, but neither {_SINGLE} nor {INDEX}, by which weights are found"
        )
    shards = files.read_object(INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelRefused(f"{INDEX} of {path} has no weight_map, which names the files of weights")
    named = sorted({str(name) for name in shards.values()})
    if missing := [name for name in named if not (files.folder / name).is_file()]:
        raise ModelRefused(
            f"{path} lacks {len(missing)} of the {len(named)} files of weights that {INDEX} "
            f"names, for example {missing[0]}: it is not fully downloaded"
        )
    return named


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The tensors' shapes by their names. Raises SafetensorError for a cut or damaged file."""
    with safe_open(file, framework="np") as opened:
        names = opened.keys()
        return {name: tuple(opened.get_slice(name).get_shape()) for name in names}


def _shapes_in(files: ModelFiles, name: str) -> dict[str, tuple[int, ...]]:
    file = files.folder / name
    try:
        return read_shapes(file)
    except SafetensorError as exc:
        raise ModelRefused(
            f"{name} of {files.model_path} is cut or damaged: its {file.stat().st_size} bytes are "
            "not what its header describes; download it again"
        ) from exc


def _check_uniform(
    path: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    sizes = {name: size for name, size in config.items() if type(size) is int}
    if config["model_type"] in _OWN_HEAD_DIM and _HEADS[0] in sizes and "hidden_size" in sizes:
        sizes.setdefault("head_dim", sizes["hidden_size"] // max(1, sizes[_HEADS[0]]))
    for name, shape in shapes.items():
        matrix = next((end for end in _SHAPES if name.endswith(f"{end}.weight")), None)
        used = [each for part in _SHAPES[matrix] for each in part] if matrix else []
        if not matrix or len(shape) != 2 or not sizes.keys() >= set(used):
            continue
        expected = [math.prod(sizes[each] for each in part) for part in _SHAPES[matrix]]
        if list(shape) != expected:
            said = ", ".join(f"{each} {sizes[each]}" for each in used)
            raise ModelRefused(
                f"{name} of {path} has the shape {list(shape)}, but config.json ({said}) makes it "
                f"{expected}"
            )


def _check_vocabulary(
    path: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    found = [(name, shape) for name, shape in shapes.items() if _EMBEDDING.search(name)]
    size = config.get("vocab_size")
    if type(size) is int and found and all(shape[:1] != (size,) for _, shape in found):
        name, shape = found[0]
        raise ModelRefused(
            f"{name} of {path} has the shape {list(shape)}, but config.json has vocab_size {size}"
        )
