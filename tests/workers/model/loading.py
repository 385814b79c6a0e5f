"""Loads a folder as an engine process does, on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.engine.interface import ModelRefused
from workers.ipc.messages import EngineOptions
from workers.model.loader import LoadedModel, load_model
from workers.model.matmul_choice import Processor


def load(
    folder: Path | str,
    lines: list[str] | None = None,
    processor: Processor | None = None,
    **options: Any,
) -> LoadedModel:
    """`lines` receives the messages of the load. Raises ModelRefused."""
    arguments: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4} | options
    asked = EngineOptions(model_path=str(folder), **arguments)
    return load_model(asked, ([] if lines is None else lines).append, processor)


def refusal(folder: Path | str, **options: Any) -> str:
    """The sentence of a refusal."""
    with pytest.raises(ModelRefused) as caught:
        load(folder, **options)
    sentence = str(caught.value)
    assert 0 < len(sentence) < 600
    assert "\n" not in sentence
    return sentence


class FakeCard:
    """A card whose largest step takes `step_bytes`, or more than it has (None), and whose free
    memory is constant."""

    def __init__(self, step_bytes: int | None, free_bytes: int = 2**40) -> None:
        self.free_bytes, self._step_bytes = free_bytes, step_bytes

    def peak_bytes(self, compute: Callable[[], None]) -> int:
        compute()
        if self._step_bytes is None:
            raise torch.OutOfMemoryError
        return self._step_bytes


def use_card(card: FakeCard, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Instead of the device's, in these modules of workers/model."""
    for module in modules:
        monkeypatch.setattr(f"workers.model.{module}.card_of", lambda device: card)
