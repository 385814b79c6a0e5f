"""A decoder's layers run in one loop if the result is the same, otherwise not."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.workers.model.fused import fused
from tests.workers.model.processors import ISAS, PROCESSORS
from workers.model.attention.interface import RowSpan
from workers.model.fusion.stack import Stack
from workers.model.kv_cache import PagedStep
from workers.model.matmul_choice import Processor, Product
from workers.model.native.library import Isa
from workers.model.proof import Untouched, streamline

CPU = torch.device("cpu")


def merged(
    family: str,
    dtype: torch.dtype = torch.float32,
    processor: Processor | None = None,
    **changes: Any,
) -> tuple[Any, Any, Untouched]:
    """A tiny decoder with exchanged modules, its runner, and its earlier output."""
    patient = fused(family, dtype, processor=processor, **changes)
    return patient.decoder, patient.runner, patient.untouched


@pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_families_of_the_common_shape_run_as_one_loop(family: str, processor: Processor) -> None:
    """Including biases, windows and norms of heads. The logits are compared."""
    decoder, runner, untouched = merged(family, processor=processor)

    assert streamline(runner, decoder, untouched)
    assert isinstance(runner.stack, Stack)


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", [[], [5], [0, 2, 5], [0, 1, 2, 3, 4, 5]], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.each_pair
def test_one_native_call_equals_the_loop_over_layers(
    family: str, wanted: list[int], dtype: torch.dtype, isa: Isa
) -> None:
    """The same logits for any requested rows, and the same keys and values."""
    processor = Processor(isa, frozenset({Product.OWN}))
    decoder, runner, untouched = merged(family, dtype, processor, num_hidden_layers=3)
    assert streamline(runner, decoder, untouched)
    native = runner.stack._native
    assert native is not None
    ids, index = torch.arange(6)[None] + 3, torch.tensor(wanted, dtype=torch.int64)
    found, kept = [], []
    for runner.stack._native in (native, None):
        for layer in runner.cache.tensors:
            layer.zero_()
        logits = runner.forward(ids, ids - 3, index, _step(runner, 6))
        found.append(logits.float())
        kept.append([layer[0].float() for layer in runner.cache.tensors])

    most = 1e-4 if dtype == torch.float32 else 0.1
    assert len(found[0]) == len(wanted)
    torch.testing.assert_close(found[0], found[1], rtol=most, atol=most)
    torch.testing.assert_close(kept[0], kept[1], rtol=most, atol=most)


@pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS)
def test_a_bias_keeps_the_layers_apart(processor: Processor) -> None:
    """The native call does not support a bias; the loop does."""
    decoder, runner, untouched = merged("llama", processor=processor, attention_bias=True)

    assert streamline(runner, decoder, untouched)
    assert runner.stack._native is None


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_neox"])
def test_other_shapes_keep_their_forward(family: str) -> None:
    """With additional or unknown norms."""
    decoder, runner, untouched = merged(family)

    assert not streamline(runner, decoder, untouched)
    assert runner.stack is None


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("granite", {"logits_scaling": 8.0}),
        ("granite", {"embedding_multiplier": 12.0}),
        ("granite", {"residual_multiplier": 0.3}),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else value,
)
def test_a_forward_that_does_more_than_its_modules_is_kept(
    family: str, changes: dict[str, Any]
) -> None:
    """Factors belong to no module: the comparison finds each of them alone."""
    plain: dict[str, Any] = {
        "logits_scaling": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
    }
    decoder, runner, untouched = merged(family, **(plain | changes))

    assert not streamline(runner, decoder, untouched)


def test_a_layer_with_a_hook_keeps_the_forward() -> None:
    """A hook does more than the forward shows."""
    decoder, runner, untouched = merged("llama")
    decoder.model.layers[1].register_forward_hook(lambda module, args, output: None)

    assert not streamline(runner, decoder, untouched)


def test_only_requested_rows_reach_the_head() -> None:
    """Also if none is requested: then only keys and values are written."""
    decoder, runner, untouched = merged("llama")
    assert streamline(runner, decoder, untouched)
    seen: list[int] = []

    class Head(nn.Module):
        def forward(self, x: Tensor, before: Any) -> Tensor:
            seen.append(len(x))
            return x

    runner.stack._head = Head()
    ids = torch.arange(6)[None]
    for wanted in ([], [5], [0, 5]):
        step = _step(runner, 6)
        found = runner.forward(ids, ids, torch.tensor(wanted, dtype=torch.int64), step)
        assert len(found) == len(wanted)
    assert seen == [1, 2]


def _step(runner: Any, num_tokens: int) -> Any:
    """One sequence's first tokens in the cache's first block."""
    slots = np.arange(num_tokens, dtype=np.int64)
    prepared = runner.backend.prepare([RowSpan(0, num_tokens, 0, slots)], CPU)
    return PagedStep(runner.cache, prepared, torch.from_numpy(slots), runner.kernels)
