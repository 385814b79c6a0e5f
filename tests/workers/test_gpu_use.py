"""How busy a worker's GPUs are, by a program nvidia-smi that is a script here."""

from pathlib import Path

import pytest

from tests.fakes import hash_tokenizer
from tests.nvidia_smi import fake_gpus
from workers.ipc.messages import EngineOptions, EngineReady
from workers.supervisor.gpu_use import GpuUse
from workers.supervisor.holding import EngineLink

pytestmark = pytest.mark.anyio


def use_of(*uuids: str) -> GpuUse:
    ready = EngineReady(512, 300, (), hash_tokenizer(), 64, 16, 4, gpu_uuids=uuids)
    return GpuUse(EngineLink(EngineOptions(model_path="hash"), ready=ready))


async def test_the_use_of_the_engines_gpus_is_their_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no figure, as a part of a GPU, does not count; the last figure does not stay."""
    fake_gpus(tmp_path, monkeypatch, "40", "60", "[N/A]")
    use = use_of("GPU-a", "GPU-b", "GPU-c")
    await use.measure()
    assert use.share == 0.5
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '[N/A]'\n")
    await use.measure()
    assert use.share is None


async def test_only_the_engines_gpus_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their ids; for a CPU nothing is started, and a program that cannot be is no figure."""
    fake_gpus(tmp_path, monkeypatch)
    program, said = tmp_path / "nvidia-smi", tmp_path / "said"
    program.write_text(f'#!/bin/sh\necho "$@" >> {said}\necho 7\n')
    await use_of().measure()
    assert not said.exists()
    use = use_of("GPU-a", "GPU-b")
    await use.measure()
    assert use.share == 0.07
    assert said.read_text().split()[-1] == "--id=GPU-a,GPU-b"
    program.write_text("#!/no/such/shell\n")
    await use.measure()
    assert use.share is None
