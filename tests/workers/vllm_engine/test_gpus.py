"""vLLM's environment has a build for CPUs, and the machine a GPU: a script named nvidia-smi."""

from pathlib import Path

import pytest

from infra.demo_model import demo_model_path
from tests.nvidia_smi import ROWS, fake_gpus
from tests.workers.vllm_engine.driven import Engine
from workers.ipc.messages import EngineOptions, LoadFailed

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]


async def test_a_build_for_cpus_is_refused_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compute on the CPU in silence. The sentence has the cause and what helps."""
    fake_gpus(tmp_path, monkeypatch, ROWS[0])
    engine = Engine()
    await engine.start(EngineOptions(model_path=str(demo_model_path())))
    await engine.client.end()
    await engine.client.stop()
    [refusal] = [m for m in engine.received if isinstance(m, LoadFailed)]
    assert "nvidia-smi sees NVIDIA A100-SXM4-80GB, but torch cannot use it" in refusal.message
    assert "built without CUDA" in refusal.message
    assert "scripts/setup-vllm, or give --device cpu" in refusal.message
