"""A model with exchanged modules is compared with the original; wrong modules are restored."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny_models import save_tiny_model
from tests.workers.model.driver import make_sequence, run_to_end
from tests.workers.model.fused import fused
from tests.workers.model.loading import load, refusal
from tests.workers.model.parity import NUM_OUTPUT, expected_of
from workers.model import paged as paging
from workers.model import proof
from workers.model.attention.packed import PackedAttention
from workers.model.fusion import exchange
from workers.model.fusion.blocks import MergedMLP
from workers.model.fusion.exchange import ATTENTION, MLP
from workers.model.loaded import Loaded
from workers.model.loader import LoadedModel
from workers.model.proof import Untouched
from workers.model.sequential import SequentialRunner

NUM_STEPS = 4  # of the proof, in each of which an MLP is called once


def check_tokens(loaded: LoadedModel, family: str, folder: Path) -> None:
    """Asserts that they are those of generate."""
    expected = expected_of(family, folder)
    sequences = [make_sequence(prompt, max_tokens=NUM_OUTPUT) for prompt in expected.prompts]
    for number, ids in enumerate(run_to_end(loaded.model, sequences, 7)):
        expected.check(number, ids)


def line_with(text: str, lines: list[str]) -> str:
    [line] = [line for line in lines if text in line]
    return line


Answer = Callable[[Tensor, Tensor], Tensor]  # what a planted MLP makes of its input and output


def plant(
    monkeypatch: pytest.MonkeyPatch, is_wrong: Callable[[int, int], bool], do: Answer
) -> None:
    """MLPs with another result if `is_wrong(number, num_calls)`: the module's number in order of
    creation, and the number of its calls so far."""
    made: list[nn.Module] = []

    class Planted(MergedMLP):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.number, self.num_calls = len(made), 0
            made.append(self)

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.num_calls += 1
            return do(x, out) if is_wrong(self.number, self.num_calls) else out

    monkeypatch.setattr(exchange, "MergedMLP", Planted)


def test_a_module_is_tried_with_its_model_s_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This module takes only three dimensions, while a shared expert is given two."""

    class Planted(MergedMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[0])[None]

    monkeypatch.setattr(exchange, "MergedMLP", Planted)
    folder = save_tiny_model("qwen2_moe", tmp_path)

    lines: list[str] = []
    loaded = load(folder, lines)

    assert line_with("gated MLPs would differ", lines).endswith(
        "2 gated MLPs would differ and stay as they are: "
        "model.layers.0.mlp.shared_expert, model.layers.1.mlp.shared_expert"
    )
    check_tokens(loaded, "qwen2_moe", folder)


def test_half_a_head_is_rotated_if_the_model_rotates_half(tmp_path: Path) -> None:
    """By torch, since no kernel supports so small a size."""
    patient = fused("glm4_moe")

    assert len(patient.done.exchanged[ATTENTION]) == 2
    assert proof.difference(patient.runner, patient.decoder, patient.untouched) is None


def triple(x: Tensor, out: Tensor) -> Tensor:
    return 3 * out


def raise_error(x: Tensor, out: Tensor) -> Tensor:
    raise ZeroDivisionError("planted")


def add_one(x: Tensor, out: Tensor) -> Tensor:
    """Right results of its own, but what is beside it gets another input."""
    x += 1.0
    return out


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("do", [triple, raise_error, add_one])
@pytest.mark.each_value
def test_a_module_that_fails_in_the_whole_model_costs_all_exchanges(
    do: Answer, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer's module passes its trial and fails later."""
    family = "qwen2_moe" if do is add_one else "llama"
    number_of_wrong = 0 if do is add_one else 1
    plant(monkeypatch, lambda number, calls: number == number_of_wrong and calls > NUM_STEPS, do)
    folder = save_tiny_model(family, tmp_path)

    lines: list[str] = []
    loaded = load(folder, lines, quantization=quantization)

    assert ("ZeroDivisionError" in line_with("not what it was", lines)) == (do is raise_error)
    assert lines.count("no module is exchanged, and the weights are read again") == 1
    assert "gated MLPs" in line_with("merged or packed", lines)
    if quantization == "none":
        check_tokens(loaded, family, folder)


def test_a_forward_that_raises_in_a_paged_batch_is_not_paged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here if several streams decode, which no prompt shows."""
    prepare = PackedAttention.prepare

    def planted(self: Any, spans: Any, device: Any) -> Any:
        assert len(spans) < 3 or any(span.num_tokens > 1 for span in spans), "planted"
        return prepare(self, spans, device)

    monkeypatch.setattr(PackedAttention, "prepare", planted)
    folder = save_tiny_model("llama", tmp_path)

    lines: list[str] = []
    loaded = load(folder, lines, attention="torch")

    assert isinstance(loaded.model, SequentialRunner)
    assert "does not run in a paged batch: planted" in line_with("served one sequence", lines)
    check_tokens(loaded, "llama", folder)


@pytest.mark.parametrize("error", [KeyError, AssertionError, ZeroDivisionError])
def test_a_forward_that_never_runs_is_refused(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a job fails by it."""

    def planted(self: Any, x: Tensor) -> Tensor:
        raise error("planted")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", planted)

    assert "does not run on plain tokens" in refusal(save_tiny_model("llama", tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tie_between_experts_is_no_difference(dtype: torch.dtype) -> None:
    """Only rounding decides between them: the choice of experts is repeated, otherwise the logits
    would differ."""
    unit = torch.finfo(dtype).eps

    def spoil(decoder: Any) -> None:
        for layer in decoder.model.layers:
            router = layer.mlp.gate.weight
            noise = torch.randn(router.shape, generator=torch.Generator().manual_seed(1))
            router.copy_(router[:1] * (1.0 + unit * noise))

    with torch.no_grad():
        patient = fused("qwen2_moe", dtype, spoil=spoil)
    before = patient.untouched
    free = Untouched(before.steps, before.calls, before.logits, choices=())

    assert patient.num(MLP) == patient.num(ATTENTION) == 2
    assert proof.difference(patient.runner, patient.decoder, before) is None
    assert proof.difference(patient.runner, patient.decoder, free) is not None


def test_weights_are_never_in_memory_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanged modules are freed; a decoder is freed before it is loaded again."""
    plant(monkeypatch, lambda number, num_calls: number == 1 and num_calls > NUM_STEPS, triple)
    old: list[weakref.ref[Tensor]] = []
    num_alive: list[int] = []
    read, look = Loaded.renew, proof.difference

    def alive() -> list[Tensor]:
        return [weight for each in old if (weight := each()) is not None]

    def planted_read(self: Any, progress: Any) -> None:
        original = self.read

        def counted() -> nn.Module:
            num_alive.append(len(alive()))
            decoder: nn.Module = original()
            weights = [m.weight for m in decoder.modules() if isinstance(m, nn.Linear)]
            old[:] = map(weakref.ref, weights)
            return decoder

        self.read = counted
        read(self, progress)
        self.read = original

    def planted_look(*args: Any) -> str | None:
        gc.collect()
        num_alive.append(len(alive()))
        return look(*args)

    monkeypatch.setattr(Loaded, "renew", planted_read)
    monkeypatch.setattr(paging, "difference", planted_look)

    load(save_tiny_model("llama", tmp_path))

    assert num_alive == [0, 0, 0]
