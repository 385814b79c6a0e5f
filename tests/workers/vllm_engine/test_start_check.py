"""What a start of vLLM needs is checked before weights are read: releases, memory, /dev/shm. Each
refusal is one sentence with the figures. Needs no vLLM."""

import re
import shutil
from pathlib import Path

import pytest

from tests.vllm_environment import ROOT
from workers.engine.interface import ModelRefused
from workers.model.nvidia import Gpu
from workers.vllm_engine.start_check import check_memory, check_release, check_shm

GIB = 2**30
KNOWN = ("0.31.0", "0.32.0", "0.32.1rc2", "0.33.0", "0.33.7.post1", "0.33.0+cu130")
UNKNOWN = ("0.30.2", "0.9.1", "0.34.0", "0.34.0rc1", "0.310.0", "1.0.0", "1.32.0", "2.0")


@pytest.mark.parametrize("release", [*KNOWN, "0.34.0.dev12+g1234", "dev", ""])
def test_a_known_release_starts(release: str) -> None:
    """And one of other sources, whose number tells nothing."""
    check_release(release)


@pytest.mark.parametrize("release", UNKNOWN)
def test_a_release_that_was_not_tried_is_refused(release: str) -> None:
    with pytest.raises(ModelRefused, match=r"batchway drives 0[.]31 to 0[.]33") as refused:
        check_release(release)

    assert f"vLLM {release}, " in str(refused.value)


def test_the_known_releases_are_those_that_scripts_install() -> None:
    script = (ROOT / "scripts" / "setup-vllm").read_text()
    installed = re.findall(r"\[(?:oldest|newest)\]=([\d.]+)", script)
    assert len(installed) == 3

    for release in installed:
        check_release(release)


NEEDED = 160 * 2**20


@pytest.mark.parametrize(
    ("num_ranks", "num_free", "is_refused"),
    [
        (1, 0, False),
        (1, 64 * 2**20, False),
        (2, 64 * 2**20, True),  # what a container has by default
        (2, NEEDED - 1, True),
        (2, NEEDED, False),
        (8, 64 * 2**20, True),
        (8, GIB, False),
    ],
)
def test_several_ranks_need_shared_memory(
    num_ranks: int, num_free: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: whole._replace(free=num_free))
    if not is_refused:
        check_shm(num_ranks, NEEDED)
        return
    with pytest.raises(ModelRefused, match=r"/dev/shm has .* GiB free") as no:
        check_shm(num_ranks, NEEDED)
    assert f"between {num_ranks} ranks of vLLM may take 0.156 GiB" in str(no.value)
    assert "--shm-size" in str(no.value)


def test_what_is_free_in_shared_memory_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the folder, as on macOS, vLLM decides."""
    with pytest.raises(ModelRefused, match=r"may take 1e[+]06 GiB"):
        check_shm(2, 10**6 * GIB)
    monkeypatch.setattr("workers.vllm_engine.start_check._SHM", tmp_path / "none")
    check_shm(2, 10**6 * GIB)


def gpu(index: int, total_gib: float | None = 80, free_gib: float | None = 80) -> Gpu:
    sizes = (None if gib is None else int(gib * GIB) for gib in (total_gib, free_gib))
    return Gpu(str(index), f"GPU-{index}", "NVIDIA A100", "580.1", *sizes)


@pytest.mark.parametrize(
    ("weights_gib", "kv_gib", "gpus", "num_ranks", "share", "refused"),
    [
        (70, 0, (gpu(0),), 1, 0.92, None),
        (74, 0, (gpu(0),), 1, 0.92, "GPU 0 (NVIDIA A100) has 73.6 GiB"),
        (74, 0, (gpu(0),), 1, 1.0, None),
        (70, 0, (gpu(0, 80, 40),), 1, 0.92, "GPU 0 (NVIDIA A100) has 40 GiB"),
        (30, 20, (gpu(0, 80, 40),), 1, 1.0, "30 GiB for weights and 20 GiB for its KV cache"),
        (30, 5, (gpu(0, 80, 40),), 1, 1.0, None),
        (30, 0, (gpu(0), gpu(1, 80, 20)), 1, 0.92, None),
        (30, 0, (gpu(0), gpu(1, 80, 20)), 2, 0.92, "GPU 1 (NVIDIA A100) has 20 GiB"),
        (500, 0, (gpu(0, None, None),), 1, 0.92, None),
        (500, 0, (gpu(0, 80, None), gpu(1, None, 80)), 2, 0.92, None),
        (0, 0, (gpu(0, 80, 0.1),), 1, 0.92, None),
    ],
)
def test_a_gpu_must_hold_weights_and_kv_cache(
    weights_gib: float,
    kv_gib: float,
    gpus: tuple[Gpu, ...],
    num_ranks: int,
    share: float,
    refused: str | None,
) -> None:
    """What nvidia-smi does not know is left to vLLM."""
    sizes = int(weights_gib * GIB), int(kv_gib * GIB)
    if refused is None:
        check_memory(*sizes, gpus, num_ranks, share)
        return
    with pytest.raises(ModelRefused) as no:
        check_memory(*sizes, gpus, num_ranks, share)
    assert refused in str(no.value)
    assert "each rank of vLLM needs" in str(no.value)


def test_the_ranks_of_a_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.vllm_engine.start_check.free_cpu_bytes", lambda: 8 * GIB)
    check_memory(3 * GIB, GIB, (), 2, 0.92)

    with pytest.raises(ModelRefused, match="this machine has 4 GiB for it"):
        check_memory(4 * GIB, GIB, (), 2, 0.92)
