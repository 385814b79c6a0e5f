"""A tiny configuration of every causal model in the registry of the installed transformers.

One rule shrinks any configuration by the names of its numbers; `_EXCEPTIONS` has what it gets
wrong. `bench.families` and its test make models of them.
"""

import re
from typing import Any

from tests.tiny_families import EOS_ID, FAMILIES, VOCAB_SIZE, WINDOW
from tests.tiny_models import random_model

# Names of sizes, and the most that a tiny model has; the first that matches holds.
_MOST = (
    (r"bos_token_id|start_token_id|decoder_start_token_id", 0),
    (r"eos_token_id|forced_eos_token_id", EOS_ID),
    (r"pad_token_id", 2),
    (r".*(token_id|_index)", 3),
    (r".*vocab_size.*", VOCAB_SIZE),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|.*_positions|context_length", 512),
    (r"original_max_position_embeddings|model_max_length", 512),
    (r".*(window|window_len|window_size|chunk_size|attn_chunk_length)", WINDOW),
    (r"num_experts_per_tok.*|top_k_experts|moe_topk|moe_k", 2),
    (r"n_group|num_expert_group|topk_group", 1),
    (r".*(n_routed_experts|num_experts|num_local_experts|expert_num)", 4),
    (r".*(kv_heads|key_value_heads|num_key_heads|query_groups)", 2),
    (r".*(attention_heads|n_heads?|num_heads|value_heads|index_n_heads)", 4),
    (r".*(rope_head_dim|rotary_dim)", 8),
    (r".*(head_dim|d_head|dim_head|head_size|kv_channels|headdim)", 16),
    (r".*(rank|state_size|d_state|ssm_state_size|d_rel)", 16),
    (r".*(intermediate|ffn|ff|feed_forward|inner|mlp).*", 96),
    (r".*(hidden_size|n_embd|d_model|embed_dim|embedding_dim|emb_dim|dim|embedding_size)", 64),
    (r".*(width|lru_width)", 64),
)
_MOST_OF_OTHERS = 64
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_FEWEST_LAYERS, _MOST_LAYERS = 2, 6
# Sizes that some configurations leave open, so that no model can be made of their defaults.
_OPEN: dict[str, Any] = {"head_dim": 16, "num_experts_per_tok": 2, "n_routed_experts": 4}
_OPEN |= {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
# Set by the configuration itself, from others.
_DERIVED_WITH_ROPE_DIM = ("head_dim", "qk_head_dim")
# Their sizes must fit together in a way that no name shows: those of `tests.tiny_families`.
_BY_HAND = (
    *("BambaConfig", "FalconH1Config", "GraniteMoeHybridConfig", "JambaConfig", "Lfm2Config"),
    *("Lfm2MoeConfig", "Mamba2Config", "NemotronConfig", "NemotronHConfig", "RecurrentGemmaConfig"),
    "Zamba2Config",
)
# What the rule gets wrong, by model type.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SHARED_KV: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    # Beyond this it chooses keys by all tokens, also later ones.
    "doge": {"keep_window_size": 512},
    "dots3_note_text": {
        "head_dim": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
    },
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3n_text": {
        **_SHARED_KV,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 4,
        }
    },
    "gemma4_text": {**_SHARED_KV, "head_dim": 16, "global_head_dim": 32},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "longcat_flash": {"head_dim": 8, "num_layers": 2},
    # Its cache has a window that its mask has not.
    "moshi": {"sliding_window": 512},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "head_dim": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "axial_pos_embds": False,
        "attention_head_size": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "layers_block_type": [*["linear_attention", "hybrid"] * 2, "linear_attention"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "use_mamba_kernels": False,
    },
}


def tiny_config(config_class: Any) -> Any:
    """The configuration (a PretrainedConfig) of a tiny model of this class. Raises what
    transformers raises for sizes that do not fit together."""
    by_hand = {name: arguments for name, arguments in FAMILIES.values() if name in _BY_HAND}
    return config_class(**by_hand.get(config_class.__name__) or _arguments(config_class))


def make_tiny_model(config_class: Any) -> Any:
    """A tiny random model (a PreTrainedModel) of this class."""
    return random_model(tiny_config(config_class))


def _arguments(config_class: Any) -> dict[str, Any]:
    changes = _EXCEPTIONS.get(config_class.model_type, {})
    config = config_class(**changes)
    values = {config.attribute_map.get(name, name): each for name, each in vars(config).items()}
    small = {name: _small(name, each) for name, each in values.items() if _is_size(each)}
    small |= {name: size for name, size in _OPEN.items() if values.get(name, 0) is None}
    small |= _heads(values)
    if "qk_rope_head_dim" in values:
        small = {name: each for name, each in small.items() if name not in _DERIVED_WITH_ROPE_DIM}
    parts = {
        name: _arguments(type(getattr(config, name))) | changes.get(name, {})
        for name in config_class.sub_configs
        if getattr(config, name, None) is not None
    }
    if values.get("is_decoder") is False:
        small["is_decoder"] = True
    return small | _few_layers(config, values, small, changes) | changes | parts


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _small(name: str, value: Any) -> Any:
    """The value, if it is a size or has some, no larger than a tiny model's."""
    if isinstance(value, dict):
        return {key: _small(key, each) for key, each in value.items()} | _heads(value)
    if isinstance(value, list | tuple):
        return [_small(name, each) for each in value]
    if not _is_size(value):
        return value
    return min(value, next((n for it, n in _MOST if re.fullmatch(it, name)), _MOST_OF_OTHERS))


def _heads(values: dict[str, Any]) -> dict[str, Any]:
    """As many heads of keys as of queries, where a family has no groups."""
    num_heads, num_kv_heads = map(values.get, ("num_attention_heads", "num_key_value_heads"))
    has_groups = num_heads != num_kv_heads and "kv_lora_rank" not in values
    return {} if not num_heads or has_groups else {"num_key_value_heads": 4}


def _few_layers(
    config: Any, values: dict[str, Any], small: dict[str, Any], changes: dict[str, Any]
) -> dict[str, Any]:
    """One layer of each kind, by what the configuration lists for each of its layers; or those that
    `changes` names. `small`: the sizes that all layers have."""
    name = next((each for each in _NUM_LAYERS if _is_size(values.get(each))), None)
    if name is None:
        return dict.fromkeys([key for key in values if key.endswith("coder_layers")], 2)
    count = values[name]
    lists = {
        key: list(each)
        for key, each in values.items()
        if isinstance(each, list | tuple) and len(each) == count
    }
    own = {int(layer): each for layer, each in config.to_dict().get("per_layer_config", {}).items()}
    kinds = [(*(str(each[i]) for each in lists.values()), str(own.get(i))) for i in range(count)]
    chosen = sorted({kinds.index(kind) for kind in kinds})[:_MOST_LAYERS]
    others = [i for i in range(count) if i not in chosen]
    chosen = sorted(chosen + others[: max(0, _FEWEST_LAYERS - len(chosen))])
    chosen = list(range(count)) if name in changes else chosen
    few: dict[str, Any] = {
        key: [_small(key, each[i]) for i in chosen] for key, each in lists.items()
    }
    if set(few.get("layer_types", ())) == {"full_attention"} and values.get("sliding_window"):
        few["layer_types"][0] = "sliding_attention"
    few |= {key: len(chosen) for key in values if key == name or key.endswith("coder_layers")}
    if own:
        few["per_layer_config"] = {
            at: _differing(values, small, own[i]) for at, i in enumerate(chosen) if i in own
        }
    return few


def _differing(
    values: dict[str, Any], small: dict[str, Any], own: dict[str, Any]
) -> dict[str, Any]:
    """The sizes that one layer has for itself: as `own` to `values`, so it is to `small`."""
    found: dict[str, Any] = _small("", own)
    for name, size in found.items():
        if _is_size(size) and size == small.get(name):
            found[name] = size * 2 if own[name] > values[name] else max(1, size // 2)
    return found
