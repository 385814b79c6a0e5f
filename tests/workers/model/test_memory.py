"""The size of the KV cache on a card, from figures of its memory: no card is needed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import VOCAB_SIZE
from tests.workers.model import loading
from tests.workers.model.driver import make_prompts, make_sequence, run_to_end
from tests.workers.model.loading import FakeCard, use_card
from workers.engine.interface import ModelRefused
from workers.model import memory
from workers.model.model_path import least_weight_bytes
from workers.model.runner import ModelRunner

GIB = 2**30
BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, size, float32


def load(folder: Path, card: FakeCard, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    use_card(card, monkeypatch, "memory", "loaded")
    return loading.load(folder, **({"fused": False, "max_num_seqs": 64} | options)).model


def test_the_cache_gets_what_the_largest_step_leaves(
    saved_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that step was run; the tokens are those of a cache of another size."""
    computing = memory.computing_bytes(10_000)
    card = FakeCard(10_000, computing + 40 * BLOCK_BYTES)

    model = load(saved_llama, card, monkeypatch)

    assert isinstance(model, ModelRunner)
    assert model.num_blocks == 40
    assert model.cache.num_bytes == 41 * BLOCK_BYTES  # with padding's
    assert model.max_model_len == 512
    outputs = []
    for each in (model, load(saved_llama, card, monkeypatch, kv_memory_bytes=100 * BLOCK_BYTES)):
        prompts = make_prompts([14, 25], VOCAB_SIZE)
        outputs.append(run_to_end(each, [make_sequence(p, max_tokens=5) for p in prompts], 9))
    assert outputs[0] == outputs[1]


def test_the_measured_step_has_the_largest_budget(
    saved_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its logits, and as many rows as may run."""
    shapes: list[tuple[int, ...]] = []
    plain = ModelRunner.padding_logits

    def noted(self: ModelRunner, padding: Any) -> torch.Tensor:
        logits = plain(self, padding)
        shapes.append(tuple(logits.shape))
        return logits

    monkeypatch.setattr(ModelRunner, "padding_logits", noted)

    load(saved_llama, FakeCard(10_000, 4 * GIB), monkeypatch, max_num_batched_tokens=700)

    assert shapes == [(700, VOCAB_SIZE)]


def test_a_card_that_holds_too_little_is_refused(
    saved_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within a share of its memory, with a share that fits."""
    with pytest.raises(ModelRefused, match="bytes hold 0 blocks of KV"):
        load(saved_llama, FakeCard(0, memory.computing_bytes(0)), monkeypatch)
    monkeypatch.setattr(memory, "total_cpu_bytes", lambda: 2 * GIB)
    card = FakeCard(10_000, 2 * GIB)
    with pytest.raises(ModelRefused, match=r"0\.75 GiB for computing: a share of ") as caught:
        load(saved_llama, card, monkeypatch, memory_share=0.3)
    fitting = float(str(caught.value).split("a share of ")[1].split(" would fit")[0])

    model = load(saved_llama, card, monkeypatch, memory_share=fitting)

    assert model.num_blocks * model.block_size >= memory.LEAST_KV_TOKENS


@pytest.mark.parametrize(
    ("stored", "dtype", "quantization", "on_gpu", "expected"),
    [
        ("F32", "auto", "none", False, 4000),
        ("F32", "auto", "none", True, 2000),
        ("F32", "float32", "none", True, 4000),
        ("BF16", "auto", "none", False, 4000),
        ("BF16", "bfloat16", "none", False, 2000),
        ("F16", "float16", "none", True, 2000),
        ("BF16", "auto", "int8", False, 1000),
        ("F8_E4M3", "auto", "none", True, 1000),
        ("F8_E4M3", "bfloat16", "none", True, 1000),
        ("I32", "auto", "none", True, 4000),
        ("U8", "float32", "none", False, 1000),
    ],
)
def test_weights_are_counted_by_their_headers(
    stored: str, dtype: str, quantization: str, on_gpu: bool, expected: int, tmp_path: Path
) -> None:
    """Weights in float take the type in which they are loaded, quantised ones what they are stored
    in. A thousand elements."""
    num_bytes = 1000 * {"F32": 4, "I32": 4, "BF16": 2, "F16": 2}.get(stored, 1)
    tensor = {"dtype": stored, "shape": [10, 100], "data_offsets": [0, num_bytes]}
    header = json.dumps({"a.weight": tensor, "__metadata__": {"format": "pt"}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))

    found = least_weight_bytes(str(tmp_path), dtype, quantization, on_gpu=on_gpu)

    assert found == expected
