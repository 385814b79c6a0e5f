"""Tiny models, loaded once per session, and one thread for torch, because the tensors are small."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny_models import save_tiny_model
from workers.ipc.messages import EngineOptions
from workers.model.loader import LoadedModel, load_model
from workers.model.runner import ModelRunner
from workers.model.sequential import SequentialRunner


def paged(loaded: LoadedModel) -> ModelRunner:
    """The model, which must be served as paged."""
    assert isinstance(loaded.model, ModelRunner)
    return loaded.model


def sequential(loaded: LoadedModel) -> SequentialRunner:
    """The model, which must be served one sequence at a time."""
    assert isinstance(loaded.model, SequentialRunner)
    return loaded.model


LoadFamily = Callable[[str], tuple[LoadedModel, Path]]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """What earlier files have imported and keep is frozen: each load of a model looks for garbage,
    and to search all of it takes longer than the load of a tiny model."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def load_family(tmp_path_factory: pytest.TempPathFactory) -> LoadFamily:
    """Saves and loads a family's tiny model, once; returns it and its folder."""
    loaded: dict[str, tuple[LoadedModel, Path]] = {}

    def load(family: str) -> tuple[LoadedModel, Path]:
        if family not in loaded:
            folder = save_tiny_model(family, tmp_path_factory.mktemp(family))
            options = EngineOptions(model_path=str(folder), device="cpu", max_num_seqs=16)
            loaded[family] = (load_model(options, lambda text: None), folder)
        return loaded[family]

    return load
