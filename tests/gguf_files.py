"""Writes tiny models as GGUF files, as llama.cpp's conversion does."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import pre_tokenizers
from transformers import PretrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from tests.tiny_models import make_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<pad>", "<|endoftext|>")
# What llama.cpp's conversion does to the tensors of a family whose name contains one of the words.
_Change = Callable[[torch.Tensor, PretrainedConfig], torch.Tensor]


def _permuted(num_heads: str) -> _Change:
    def permute(tensor: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
        heads = getattr(config, num_heads)
        halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)

    return permute


def _plus_one(tensor: torch.Tensor, _: PretrainedConfig) -> torch.Tensor:
    return tensor + 1


def _transposed(tensor: torch.Tensor, _: PretrainedConfig) -> torch.Tensor:
    return tensor.T


_CHANGES: Mapping[str, Mapping[str, _Change]] = {
    "llama": {
        "attn_q.": _permuted("num_attention_heads"),
        "attn_k.": _permuted("num_key_value_heads"),
    },
    "gemma2": {"norm.weight": _plus_one},
    "gemma3": {"norm.weight": _plus_one},
    "nemotron": {"norm.weight": _plus_one},
    "gpt2": {
        f"{name}.weight": _transposed for name in ("attn_qkv", "ffn_down", "ffn_up", "attn_output")
    },
}


def write_gguf(
    file: Path,
    family: str = "llama",
    kind: str = "F32",
    *,
    without: Collection[str] = (),
    tensors: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    **metadata: Any,
) -> Any:
    """Writes a tiny random model, and returns it (a PreTrainedModel). `kind`: of the matrices, as
    GGUF names it. `without`: names of tensors to leave out. `tensors`: more of them. `changes`: of
    the model's configuration. `metadata`: of the file, whose names have `__` for a dot."""
    model = make_model(family, **(changes or {}))
    writer = GGUFWriter(file, family)
    _add_sizes(writer, family, model.config)
    _add_tokenizer(writer, model.config.vocab_size)
    for name, value in metadata.items():
        writer.kv_data[0].pop(key := name.replace("__", "."), None)
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    state = model.state_dict()
    processor: Any = TensorProcessor
    names = get_gguf_hf_weights_map(model, processor())
    for gguf_name, name in names.items():
        if gguf_name in without:
            continue
        tensor = state[name]
        for words, change in _CHANGES.get(family, {}).items():
            if words in f"{gguf_name}.":
                tensor = change(tensor, model.config)
        _add(writer, gguf_name, tensor, kind)
    for gguf_name, tensor in (tensors or {}).items():
        _add(writer, gguf_name, tensor, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add(writer: GGUFWriter, name: str, tensor: torch.Tensor, kind: str) -> None:
    array = np.ascontiguousarray(tensor.detach().numpy(), dtype=np.float32)
    if kind == "F32" or array.ndim < 2:
        writer.add_tensor(name, array)
        return
    found = GGMLQuantizationType[kind]
    writer.add_tensor(name, quantize(array, found), raw_dtype=found)


def _add_sizes(writer: GGUFWriter, architecture: str, config: PretrainedConfig) -> None:
    fields: Any = GGUF_CONFIG_MAPPING
    for key, field in fields[architecture].items():
        value = getattr(config, field or "", None)
        if field == "rope_theta":
            value = config.rope_parameters.get("rope_theta", 10_000.0)
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)


def _add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    """Bytes as tokens, behind the special tokens 0 … 3, and a merge."""
    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    tokens += [f"[{number}]" for number in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(_SPECIAL) + [1] * (len(tokens) - len(_SPECIAL)))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_chat_template(CHATML)
