"""Sizes that differ by layer: loaded, kept and counted layer by layer."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.tiny_families import VOCAB_SIZE
from tests.tiny_models import edit_json, random_model, save_tokenizer
from tests.tiny_registry import tiny_config
from tests.workers.model.conftest import paged
from tests.workers.model.driver import generate_greedily, make_prompts, make_sequence, run_to_end
from tests.workers.model.loading import load, refusal
from workers.model.checkpoint import layer_configs
from workers.model.kv_cache import token_bytes

FAMILIES = ["gemma4_text", "gemma4_unified_text"]
# What layers of full attention have for themselves.
OWN: list[dict[str, int]] = [
    {"num_key_value_heads": 1},
    {"head_dim": 32},
    {"head_dim": 8, "num_key_value_heads": 4},
    {"num_key_value_heads": 4},
]
pytestmark = pytest.mark.skipif(
    not hasattr(AutoConfig.for_model("llama"), "per_layer_config"),
    reason="transformers has no sizes by layer before 5.24",
)


def save_uneven(folder: Path, model_type: str, own: dict[str, int]) -> Any:
    """A model whose layers of full attention have sizes of their own; returns it."""
    config = tiny_config(type(AutoConfig.for_model(model_type)))
    is_full = [kind == "full_attention" for kind in config.layer_types]
    config.per_layer_config = {i: own for i, each in enumerate(is_full) if each}
    model = random_model(config)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_with_uneven_layers_is_served_in_one_batch(
    model_type: str, own: dict[str, int], tmp_path: Path
) -> None:
    """With the tokens of `generate`, and keys and values in the sizes of each layer."""
    model = save_uneven(tmp_path, model_type, own)
    prompts = make_prompts([5, 20], VOCAB_SIZE)
    expected = [generate_greedily(model, prompt, 8) for prompt in prompts]
    runner = paged(load(tmp_path))
    sequences = [make_sequence(prompt, max_tokens=8) for prompt in prompts]

    assert run_to_end(runner, sequences, 7) == expected
    sizes = [(layer.num_key_value_heads, layer.head_dim) for layer in layer_configs(model.config)]
    layers = runner.cache.layers.values()
    assert [layer.keys.shape[2:] for layer in layers] == sizes
    assert [layer.values.shape[2:] for layer in layers] == sizes


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_and_values_keep_them_once(model_type: str, tmp_path: Path) -> None:
    """Two of four layers attend to what the others keep, each to that of its own kind."""
    random_model(tiny_config(type(AutoConfig.for_model(model_type)))).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)

    cache = paged(load(tmp_path)).cache
    layers = list(cache.layers.values())

    places = [layer.keys.data_ptr() for layer in layers]
    assert len(places) == 4
    assert places[2:] == places[:2]
    assert places[0] != places[1]
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers[:2])
    assert cache.num_bytes == kept
    num_slots = (cache.num_blocks + 1) * cache.block_size
    assert token_bytes([layer.shape for layer in layers], cache.dtype) == kept // num_slots
    cache.resize(cache.num_blocks // 2)
    assert cache.num_bytes < kept * 0.6


@pytest.mark.parametrize(
    ("name", "size"),
    [("num_key_value_heads", 2**40), ("head_dim", -1), ("num_attention_heads", 2**20)],
)
def test_an_impossible_size_of_one_layer_is_refused_by_name(
    name: str, size: int, tmp_path: Path
) -> None:
    save_uneven(tmp_path, "gemma4_text", {"num_key_value_heads": 1})
    own = {name: size}
    edit_json(tmp_path / "config.json", per_layer_config={"1": own, "3": own})

    assert name in refusal(tmp_path)
