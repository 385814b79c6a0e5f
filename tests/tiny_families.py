"""The configurations of tiny decoders, by how they are served. `tests.tiny_models` makes them."""

from importlib.metadata import version
from typing import Any

from packaging.version import Version

VOCAB_SIZE = 320
EOS_ID = 1
WINDOW = 12  # tokens; shorter than most prompts of the tests

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS_ID,
    "pad_token_id": 2,
    # With tied embeddings a random model mostly repeats its last token.
    "tie_word_embeddings": False,
}
_GPT2_NAMES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MIXED_LAYERS = ["sliding_attention", "full_attention"]


def _common(*without: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in (_COMMON | changes).items() if k not in without}


# family → configuration class and its arguments
PAGED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _common()),
    "qwen2": ("Qwen2Config", _common()),
    "qwen3": ("Qwen3Config", _common(head_dim=32)),
    "mistral": ("MistralConfig", _common(sliding_window=WINDOW)),
    "gpt2": ("GPT2Config", _GPT2_NAMES),
    "gpt_neox": ("GPTNeoXConfig", _common("num_key_value_heads")),
    "gemma": ("GemmaConfig", _common(head_dim=16)),
    "gemma2": (
        "Gemma2Config",
        _common(
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=_MIXED_LAYERS,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=20.0,
        ),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        _common(head_dim=16, sliding_window=WINDOW, layer_types=_MIXED_LAYERS),
    ),
    "phi": ("PhiConfig", _common("num_key_value_heads")),
    "phi3": ("Phi3Config", _common(sliding_window=WINDOW)),
    "olmo2": ("Olmo2Config", _common()),
    "olmo3": ("Olmo3Config", _common(sliding_window=WINDOW, layer_types=_MIXED_LAYERS)),
    "cohere": ("CohereConfig", _common()),
    "cohere2": ("Cohere2Config", _common(sliding_window=WINDOW, layer_types=_MIXED_LAYERS)),
    "granite": ("GraniteConfig", _common(attention_multiplier=0.2, logits_scaling=2.0)),
    "stablelm": ("StableLmConfig", _common()),
    "nemotron": ("NemotronConfig", _common()),
    "opt": (
        "OPTConfig",
        _common("intermediate_size", "num_key_value_heads", ffn_dim=96, word_embed_proj_dim=64),
    ),
    "mixtral": ("MixtralConfig", _common(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3MoeConfig", _common(num_experts=4, head_dim=16, **_MOE)),
    "gpt_oss": (
        "GptOssConfig",
        _common(
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            layer_types=_MIXED_LAYERS,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
    "smollm3": ("SmolLM3Config", _common()),
    "starcoder2": ("Starcoder2Config", _common(sliding_window=WINDOW)),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT2_NAMES),
    "deepseek_v3": (
        "DeepseekV3Config",
        _common(
            num_key_value_heads=4,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            **_MOE,
        ),
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        _common(num_experts=4, shared_expert_intermediate_size=48, **_MOE),
    ),
    "olmoe": ("OlmoeConfig", _common(num_experts=4, num_experts_per_tok=2)),
    "granitemoe": (
        "GraniteMoeConfig",
        _common(
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_multiplier=0.2,
            logits_scaling=2.0,
        ),
    ),
    "glm4": ("Glm4Config", _common(head_dim=16)),
    "glm4_moe": (
        "Glm4MoeConfig",
        _common(head_dim=16, n_routed_experts=4, first_k_dense_replace=1, use_qk_norm=True, **_MOE),
    ),
    "ernie4_5": ("Ernie4_5Config", _common(head_dim=16)),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", _common(head_dim=16)),
    "exaone4": (
        "Exaone4Config",
        _common(head_dim=16, sliding_window=WINDOW, layer_types=_MIXED_LAYERS),
    ),
    "dots1": (
        "Dots1Config",
        _common(
            head_dim=16,
            n_routed_experts=4,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            **_MOE,
        ),
    ),
    "phimoe": (
        "PhimoeConfig",
        _common(num_local_experts=4, num_experts_per_tok=2, attention_bias=True, lm_head_bias=True),
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        _common(head_dim=16, rotary_dim=8, num_local_experts=4, num_experts_per_tok=2),
    ),
}

_MAMBA = _common("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
# So small that prompts of the tests reach a second chunk of the scan.
_MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, **_MOE}
_NO_GROUPS = ("intermediate_size", "num_key_value_heads")

# Served one sequence at a time, because of their own attention or state.
SEQUENTIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neo": (
        "GPTNeoConfig",
        _common(
            "num_key_value_heads",
            "num_hidden_layers",
            "num_attention_heads",
            num_layers=2,
            num_heads=4,
            window_size=WINDOW,
            attention_types=[[["global", "local"], 1]],
        ),
    ),
    "falcon": ("FalconConfig", _common(*_NO_GROUPS)),
    "falcon_alibi": ("FalconConfig", _common(*_NO_GROUPS, alibi=True)),
    "bloom": ("BloomConfig", _common(*_NO_GROUPS)),
    "mpt": (
        "MptConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 512,
            "tie_word_embeddings": False,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        _common(
            head_dim=16,
            attention_chunk_size=16,
            num_local_experts=2,
            intermediate_size_mlp=96,
            no_rope_layers=[1, 0],
        ),
    ),
    "rwkv": ("RwkvConfig", _MAMBA | {"context_length": 512, "attention_hidden_size": 64}),
    "zamba2": (
        "Zamba2Config",
        _common(
            num_mem_blocks=1,
            hybrid_layer_ids=[1],
            layers_block_type=["mamba", "hybrid"],
            mamba_d_state=16,
            mamba_ngroups=1,
            n_mamba_heads=8,
            mamba_expand=2,
            chunk_size=16,
        ),
    ),
    "minimax": (
        "MiniMaxConfig",
        _common(
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            block_size=16,
        ),
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        _common(lru_width=64, attention_window_size=64, block_types=["recurrent", "attention"]),
    ),
}

# Served in one batch with states beside the blocks; before transformers 5.24 sequential.
STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaConfig", _MAMBA | {"state_size": 8}),
    "falcon_mamba": ("FalconMambaConfig", _MAMBA | {"state_size": 8}),
    "mamba2": (
        "Mamba2Config",
        _MAMBA
        | {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    ),
    "jamba": (
        "JambaConfig",
        _common(
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            mamba_d_state=8,
            mamba_dt_rank=8,
            use_mamba_kernels=False,
        ),
    ),
    "bamba": ("BambaConfig", _common(attn_layer_indices=[1], attn_rotary_emb=8, **_MAMBA_2)),
    "falcon_h1": ("FalconH1Config", _common(mamba_d_ssm=128, **_MAMBA_2)),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        _common(
            layer_types=["mamba", "attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=32,
            **_MAMBA_2,
        ),
    ),
    "nemotron_h": (
        "NemotronHConfig",
        _common(
            "num_hidden_layers",
            layers_block_type=["mamba", "attention"],
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=1,
            chunk_size=16,
            head_dim=16,
            mlp_hidden_act="relu2",
        ),
    ),
    "lfm2": ("Lfm2Config", _common(layer_types=["conv", "full_attention"])),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        _common(layer_types=["conv", "full_attention"], num_dense_layers=1, **_EXPERTS),
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        _common(shared_expert_intermediate_size=32, **_LINEAR, **_EXPERTS),
    ),
    "qwen3_5": ("Qwen3_5TextConfig", _common(**_LINEAR)),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        _common(layer_types=["linear_attention", "full_attention"]),
    ),
}

# Paged since transformers 5.24, before it sequential.
_PAGED_SINCE_5_24: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("GPTJConfig", _GPT2_NAMES | {"rotary_dim": 8}),
    "codegen": ("CodeGenConfig", _GPT2_NAMES | {"rotary_dim": 8}),
}
is_5_24 = Version(version("transformers")) >= Version("5.24")
# Sequential before it.
BATCHED_SINCE_5_24 = _PAGED_SINCE_5_24.keys() | STATEFUL.keys()
(PAGED if is_5_24 else SEQUENTIAL).update(_PAGED_SINCE_5_24)
if not is_5_24:
    SEQUENTIAL |= STATEFUL
    STATEFUL = {}

FAMILIES = PAGED | STATEFUL | SEQUENTIAL
# Of the paged ones, one of each kind of positions, attention and experts.
OF_EACH_KIND = [
    *("llama", "gpt2", "gpt_neox", "gemma2", "olmo2", "cohere2", "opt", "gpt_bigcode"),
    *("gpt_oss", "deepseek_v3", "qwen2_moe", "phimoe"),
]
