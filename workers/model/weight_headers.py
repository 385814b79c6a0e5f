"""Reads the headers of a folder's weights, and compares them with its index and its configuration.
Imports neither torch nor numpy."""

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from workers.engine.interface import ModelRefused
from workers.model.files import ModelFiles

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # as safetensors has it
_MOST_PER_BYTE = 2  # elements of the smallest type
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")
# The last two parts of a matrix's name: the sizes whose products are its rows and its columns.
_HEADS, _KV_HEADS = ("num_attention_heads", "head_dim"), ("num_key_value_heads", "head_dim")
_HIDDEN, _INTERMEDIATE = ("hidden_size",), ("intermediate_size",)
_SIDES = ("rows", "columns")
_OF_VOCABULARY = (
    *("model.embed_tokens", "language_model.embed_tokens", "decoder.embed_tokens", "lm_head"),
    *("wte", "transformer.wte", "gpt_neox.embed_in", "embeddings.word_embeddings"),
)
_SHAPES: dict[str, tuple[tuple[str, ...], ...]] = dict.fromkeys(_OF_VOCABULARY, (("vocab_size",),))
_SHAPES_IF_UNIFORM = {
    "self_attn.q_proj": (_HEADS, _HIDDEN),
    "self_attn.k_proj": (_KV_HEADS, _HIDDEN),
    "self_attn.v_proj": (_KV_HEADS, _HIDDEN),
    "self_attn.o_proj": (_HIDDEN, _HEADS),
    "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
    "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
    "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
}
# Families whose layers are all alike, each with weights of its own. Of others only what has the
# vocabulary's size is compared.
_UNIFORM = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "cohere", "granite"),
    *("olmo2", "olmo3", "smollm3", "seed_oss"),
)


def check_weights(files: ModelFiles, raw: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Refuses weights of a folder that are not all there, damaged, or of other sizes than
    config.json says. `raw`: its content; `text`: that of a text model within it, or empty. Raises
    ModelRefused."""
    path, config = files.model_path, {**raw, **text}
    tensors: dict[str, StoredTensor] = {}
    for name in weight_files(files):
        tensors |= read_tensors(files, name)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    indexed = {} if files.find(_SINGLE) else files.read_object(INDEX)["weight_map"]
    if missing := sorted(indexed.keys() - shapes.keys()):
        raise ModelRefused(
            f"{INDEX} of {path} names {missing[0]}, which none of its files holds: they belong to "
            "different downloads"
        )
    is_uniform = not text and raw["model_type"] in _UNIFORM
    layers = [int(found[1]) for name in shapes for found in _LAYER.finditer(name)]
    num_layers = config.get("num_hidden_layers")
    if is_uniform and layers and isinstance(num_layers, int) and max(layers) + 1 < num_layers:
        raise ModelRefused(
            f"config.json of {path} has num_hidden_layers {num_layers}, but the weights of layer "
            f"{max(layers) + 1} are missing"
        )
    known = _SHAPES | (_SHAPES_IF_UNIFORM if is_uniform else {})
    for name, shape in shapes.items():
        matrix = ".".join(name.removesuffix(".weight").split(".")[-2:])
        for side, num, factors in zip(_SIDES, shape, known.get(matrix, ()), strict=False):
            sizes: list[Any] = [config.get(factor) for factor in factors]
            is_known = all(type(size) is int for size in sizes)
            # Others may have rows beyond the vocabulary (Moshi, Mllama).
            if is_known and (num != math.prod(sizes) if is_uniform else num < math.prod(sizes)):
                said = " and ".join(map("{} {}".format, factors, sizes))
                raise ModelRefused(f"{name} of {path} has {num} {side}, but config.json has {said}")


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


class StoredTensor(msgspec.Struct):
    """An entry of a header; that of the metadata has none of the fields."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


def read_tensors(files: ModelFiles, name: str) -> dict[str, StoredTensor]:
    """A file's tensors by their names. Raises ModelRefused if it is damaged."""
    num_bytes = (files.folder / name).stat().st_size
    with (files.folder / name).open("rb") as opened:
        start = 8 + int.from_bytes(opened.read(8), "little")
        header = opened.read(min(start - 8, _MAX_HEADER_BYTES))
    try:
        tensors = msgspec.json.decode(header, type=dict[str, StoredTensor])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        tensors = {}
    tensors.pop("__metadata__", None)
    ends = [(math.prod(each.shape), *each.data_offsets) for each in tensors.values()]
    is_whole = all(0 <= num <= _MOST_PER_BYTE * (end - begin) for num, begin, end in ends)
    if not is_whole or start + max((end for _, _, end in ends), default=-1) != num_bytes:
        raise ModelRefused(
            f"{name} of {files.model_path} is cut or damaged: its {num_bytes} bytes are not what "
            "its header describes; download it again"
        )
    return tensors
