"""How many positions rotary scaling makes possible, and what is computed at those positions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import VOCAB_SIZE, edit_json, save_tiny_model
from tests.workers.model.driver import generate_greedily, make_prompts, make_sequence, run_to_end
from tests.workers.model.loading import load, refusal
from workers.engine.interface import ModelRefused
from workers.model.checkpoint import context_length, read_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FACTORS: dict[str, Any] = {"short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)]}
LONGROPE: dict[str, Any] = {
    "rope_parameters": FACTORS | {"rope_type": "longrope", "original_max_position_embeddings": 64},
    "original_max_position_embeddings": 64,
    "max_position_embeddings": 256,
    "sliding_window": None,
}
DYNAMIC: dict[str, Any] = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}


def length_of(folder: Path, **changes: Any) -> int | None:
    """The context of a tiny model with this config.json."""
    edit_json(folder / "config.json", **changes)
    return context_length(read_config(str(folder)))


@pytest.mark.parametrize(
    ("num_positions", "scaling", "length"),
    [
        (64, YARN, 256),
        (80, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        (256, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        (512, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
        (64, {"type": "yarn", "factor": 4.0}, 256),
        (64, {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 64}, 160),
        (256, {"type": "yarn", "factor": None, "original_max_position_embeddings": 64}, 256),
        (64, {"type": "dynamic", "factor": 4.0}, 256),
        (64, {"rope_type": "dynamic", "factor": 1}, 64),
        (64, {"type": "linear", "factor": 8}, 512),
        (256, LLAMA3, 256),
        (256, {"type": "longrope", "original_max_position_embeddings": 64, **FACTORS}, 256),
        (64, {"type": "default"}, 64),
        (64, None, 64),
    ],
)
def test_scaling_makes_the_positions_that_vllm_counts(
    num_positions: int, scaling: dict[str, Any] | None, length: int, llama: Path
) -> None:
    """yarn from its original length, dynamic and linear from the configured one; llama3's and
    longrope's are included. The names of old and new files."""
    for name in ("rope_scaling", "rope_parameters"):
        edit_json(llama / "config.json", rope_scaling=None, rope_parameters=None)
        given = scaling and (scaling | {"rope_theta": 10000.0})
        assert length_of(llama, max_position_embeddings=num_positions, **{name: given}) == length


def test_a_length_that_includes_its_scaling_is_not_scaled_again(tmp_path: Path) -> None:
    """Gemma 3, whose kinds of layers have parameters of their own."""
    layers = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
    }
    folder = save_tiny_model("gemma3", tmp_path, rope_parameters=layers)

    assert length_of(folder) == 512


def test_scaling_of_one_kind_of_layer_counts(tmp_path: Path) -> None:
    """Olmo 3 scales the layers with full attention alone."""
    layers = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": YARN | {"rope_theta": 10000.0},
    }
    folder = save_tiny_model("olmo3", tmp_path, rope_parameters=layers, max_position_embeddings=64)

    assert length_of(folder) == 256


@pytest.mark.parametrize("name", ["factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -4, "4", True, [4], float("nan"), float("inf"), 2**40])
def test_an_impossible_scaling_is_refused_by_name(llama: Path, name: str, value: Any) -> None:
    """A sentence, whatever stands there."""
    scaling = YARN | {"rope_theta": 10000.0, name: value}

    with pytest.raises(ModelRefused, match=f"{name}|positions"):
        length_of(llama, max_position_embeddings=64, rope_parameters=scaling)


NUM_OUTPUT = 8
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-dynamic": ("llama", DYNAMIC),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 256}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3-dynamic": ("qwen3", DYNAMIC),
    "gpt_oss-yarn": ("gpt_oss", {"rope_parameters": YARN | {"truncate": False}}),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "falcon-yarn": ("falcon", {"rope_parameters": YARN}),
    "falcon-dynamic": ("falcon", DYNAMIC),
    "phi3-longrope": ("phi3", LONGROPE),
    "gemma3-linear": (
        "gemma3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            },
            "max_position_embeddings": 256,
        },
    ),
    "olmo3-yarn": (
        "olmo3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": YARN | {"rope_theta": 10000.0},
            }
        },
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_tokens_beyond_the_original_length_are_those_of_generate(name: str, tmp_path: Path) -> None:
    """With the longest context that scaling makes possible, by default, in chunks and beside each
    other. transformers scales dynamically by the longest sequence that it has seen, so it sees one
    of that length first."""
    family, changes = LONG[name]
    folder = save_tiny_model(family, tmp_path, **({"max_position_embeddings": 64} | changes))
    loaded = load(folder)
    own: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    prompts = make_prompts([100, 180, 256 - NUM_OUTPUT], VOCAB_SIZE)
    with torch.inference_mode():
        own(torch.tensor(make_prompts([256], VOCAB_SIZE)), use_cache=False)
    expected = [generate_greedily(own, prompt, NUM_OUTPUT) for prompt in prompts]

    found = run_to_end(loaded.model, [make_sequence(p, max_tokens=NUM_OUTPUT) for p in prompts], 70)

    assert loaded.context_length == 256
    assert found == expected


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [("yarn", (10, 65, 256)), ("dynamic", (64, None)), ("linear", (200, None))],
)
def test_every_length_up_to_the_scaled_one_can_be_asked_for(
    kind: str, lengths: tuple[int | None, ...], tmp_path: Path
) -> None:
    """Shorter than the original, between, all of it; no more."""
    scaling = YARN if kind == "yarn" else {"rope_type": kind, "factor": 4.0}
    folder = save_tiny_model("qwen2", tmp_path, max_position_embeddings=64, rope_parameters=scaling)

    for asked in lengths:
        assert load(folder, max_model_len=asked, fused=False).context_length == (asked or 256)
    assert "256 positions" in refusal(folder, max_model_len=257)


@pytest.mark.parametrize(("family", "changes"), [("phi3", LONGROPE), ("llama", DYNAMIC)])
def test_scaling_is_fixed_by_the_longest_sequence_allowed(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Up to the original length as without it, as in `generate` of sequences so short."""
    folder = save_tiny_model(family, tmp_path, **({"max_position_embeddings": 64} | changes))
    model = load(folder, max_model_len=64).model
    own: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    prompts = make_prompts([5, 30], VOCAB_SIZE)
    expected = [generate_greedily(own, prompt, 12) for prompt in prompts]

    assert run_to_end(model, [make_sequence(p, max_tokens=12) for p in prompts], 1000) == expected
