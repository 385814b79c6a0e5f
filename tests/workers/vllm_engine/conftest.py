from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench.models import make_model
from tests.vllm_environment import vllm_python
from tests.workers.vllm_engine.driven import Engine, options_of, tokens_of_vllm_alone


@pytest.fixture(scope="package")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vllm_python()
    return make_model("S", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return tokens_of_vllm_alone(model, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="package")
async def engine(model: Path) -> AsyncIterator[Engine]:
    """With one rank."""
    engine = Engine()
    await engine.start(options_of(model))
    await engine.until_ready()
    yield engine
    await engine.client.stop()
