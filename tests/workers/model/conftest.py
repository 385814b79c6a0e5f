"""Tiny models, loaded once per session, and one thread for torch, because the tensors are small."""

import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny_models import save_tiny_model
from tests.workers.model.loading import load
from workers.model.loader import LoadedModel
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

    def load_once(family: str) -> tuple[LoadedModel, Path]:
        if family not in loaded:
            folder = save_tiny_model(family, tmp_path_factory.mktemp(family))
            loaded[family] = (load(folder, max_num_seqs=16), folder)
        return loaded[family]

    return load_once


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def llama(saved_llama: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    folder = tmp_path / "llama"
    shutil.copytree(saved_llama, folder)
    return folder
