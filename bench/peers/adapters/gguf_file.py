"""Converts a checkpoint of Llama's architecture for llama.cpp: FOLDER DTYPE FILE. Tokens are ids,
so the vocabulary's names are arbitrary."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from safetensors import safe_open

_MODEL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SPECIAL = ("<unk>", "<s>", "</s>")

Array = npt.NDArray[Any]


def main() -> None:
    """Writes the file atomically."""
    folder, dtype, target = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    config = json.loads((folder / "config.json").read_text())
    partial = target.with_suffix(".partial")
    writer = GGUFWriter(partial, "llama")
    _add_shape(writer, config)
    _add_vocabulary(writer, config["vocab_size"])
    _add_weights(writer, folder / "model.safetensors", config, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def _add_shape(writer: GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config["head_dim"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])


def _add_vocabulary(writer: GGUFWriter, vocab_size: int) -> None:
    """Adds unique names. None has the type byte, for which the server would delay tokens until they
    form valid UTF-8."""
    num_special = len(_SPECIAL)
    tokens = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"<{i}>" for i in range(len(tokens), vocab_size)]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    types += [TokenType.NORMAL] * (vocab_size - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_token_types(types)
    writer.add_bos_token_id(num_special - 2)
    writer.add_eos_token_id(num_special - 1)
    writer.add_add_bos_token(False)


def _add_weights(writer: GGUFWriter, weights: Path, config: dict[str, Any], dtype: str) -> None:
    """Adds matrices in `dtype`, norms in float32, as in llama.cpp's own conversion."""
    names = dict(_MODEL_NAMES)
    for i in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{i}.{a}": f"blk.{i}.{b}" for a, b in _LAYER_NAMES.items()}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    with safe_open(weights, "numpy") as file:
        for own, theirs in names.items():
            weight = file.get_tensor(f"{own}.weight").astype(np.float32)
            num_heads = heads.get(theirs.rpartition(".")[2])
            if num_heads is not None:
                weight = _halves_to_pairs(weight, num_heads)
            if dtype == "bfloat16" and weight.ndim == 2:
                kind = GGMLQuantizationType.BF16
                packed = quants.quantize(weight, kind)
                writer.add_tensor(f"{theirs}.weight", packed, raw_dtype=kind)
            else:
                writer.add_tensor(f"{theirs}.weight", np.ascontiguousarray(weight))


def _halves_to_pairs(weight: Array, num_heads: int) -> Array:
    """weight (num_heads * dim, in): llama.cpp rotates neighbours, transformers rotates halves."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    main()
