"""The size of the KV cache on a card, from figures of its memory: no card is needed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.workers.model.driver import make_prompts, make_sequence, run_to_end
from workers.engine.interface import ModelRefused
from workers.ipc.messages import EngineOptions
from workers.model import memory
from workers.model.loader import load_model
from workers.model.runner import ModelRunner

GIB = 2**30
BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, size, float32


class FakeCard:
    """A card whose largest step takes `step_bytes` and whose free memory is constant."""

    def __init__(self, free_bytes: int, step_bytes: int) -> None:
        self.free_bytes, self._step_bytes = free_bytes, step_bytes

    def peak_bytes(self, compute: Callable[[], None]) -> int:
        compute()
        return self._step_bytes


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def load(folder: Path, card: FakeCard, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    for module in ("memory", "loaded"):
        monkeypatch.setattr(f"workers.model.{module}.card_of", lambda device: card)
    arguments: dict[str, Any] = {"device": "cpu", "fused": False, "max_num_seqs": 64} | options
    return load_model(EngineOptions(model_path=str(folder), **arguments), lambda text: None).model


def test_a_card_of_24_gb_serves_a_model_of_8_billion_parameters() -> None:
    """Qwen3-8B in bfloat16, whose step of 2048 tokens with 256 rows takes 1783 MiB on an H100: its
    logits of 152k tokens, in bfloat16 and some of them in float32, and gates and values of a layer.
    What is left holds over 32 sequences of 1024 tokens, and more than the step stays free."""
    whole, driver, weights = int(23.6 * GIB), int(0.5 * GIB), int(15.26 * GIB)
    step_bytes = 1783 * 2**20
    free = whole - driver - weights

    kv_bytes = free - memory.computing_bytes(step_bytes)

    assert kv_bytes // 147_456 > 32 * 1024
    assert free - kv_bytes > 1.5 * step_bytes


def test_the_cache_gets_what_the_largest_step_leaves(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that step was run; the tokens are those of a cache of another size."""
    computing = memory.computing_bytes(10_000)
    card = FakeCard(computing + 40 * BLOCK_BYTES, 10_000)

    model = load(llama, card, monkeypatch)

    assert isinstance(model, ModelRunner)
    assert model.num_blocks == 40
    assert model.cache.num_bytes == 41 * BLOCK_BYTES  # with padding's
    assert model.max_model_len == 512
    outputs = []
    for each in (model, load(llama, card, monkeypatch, kv_memory_bytes=100 * BLOCK_BYTES)):
        prompts = make_prompts([14, 25], VOCAB_SIZE)
        outputs.append(run_to_end(each, [make_sequence(p, max_tokens=5) for p in prompts], 9))
    assert outputs[0] == outputs[1]


def test_the_measured_step_has_the_largest_budget(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its logits, and as many rows as may run."""
    shapes: list[tuple[int, ...]] = []
    plain = ModelRunner.padding_logits

    def noted(self: ModelRunner, padding: Any) -> torch.Tensor:
        logits = plain(self, padding)
        shapes.append(tuple(logits.shape))
        return logits

    monkeypatch.setattr(ModelRunner, "padding_logits", noted)

    load(llama, FakeCard(4 * GIB, 10_000), monkeypatch, max_num_batched_tokens=700)

    assert shapes == [(700, VOCAB_SIZE)]


def test_a_card_that_holds_too_little_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within a share of its memory, with a share that fits."""
    with pytest.raises(ModelRefused, match="bytes hold 0 blocks of KV"):
        load(llama, FakeCard(memory.computing_bytes(0), 0), monkeypatch)
    monkeypatch.setattr(memory, "total_cpu_bytes", lambda: 2 * GIB)
    card = FakeCard(2 * GIB, 10_000)
    with pytest.raises(ModelRefused, match=r"0\.75 GiB for computing: a share of ") as caught:
        load(llama, card, monkeypatch, memory_share=0.3)
    fitting = float(str(caught.value).split("a share of ")[1].split(" would fit")[0])

    model = load(llama, card, monkeypatch, memory_share=fitting)

    assert model.num_blocks * model.block_size >= memory.LEAST_KV_TOKENS
