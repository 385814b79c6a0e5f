from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bench.models import make_model
from tests.vllm_environment import vllm_python
from tests.workers.vllm_engine.driven import Engine, options_of, running, tokens_of_vllm_alone


@pytest.fixture(scope="package")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="package", autouse=True)
def shared_cache() -> Iterator[None]:
    """What vLLM has found out about its own classes: that takes a process and seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
        yield


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("S", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package", params=["newest", "oldest"])
def python(request: pytest.FixtureRequest) -> Path:
    """The Python of an environment with the newest or the oldest supported release."""
    return vllm_python(request.param)


@pytest.fixture(scope="package")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens that the newest vLLM generates without batchway."""
    return tokens_of_vllm_alone(vllm_python(), model, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="package")
async def engine(model: Path, python: Path) -> AsyncIterator[Engine]:
    """An engine process with one rank."""
    async with running(options_of(model), python) as engine:
        yield engine
