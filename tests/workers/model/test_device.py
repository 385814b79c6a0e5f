"""What is refused before a model is loaded, as functions of what was found. The machine's GPU is a
script named nvidia-smi, where one is needed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from transformers import LlamaConfig

from infra.demo_model import demo_model_path
from tests.nvidia_smi import ROWS, fake_gpus
from workers.engine.interface import ModelRefused
from workers.ipc.messages import EngineOptions
from workers.model import loader, machine, memory
from workers.model.device import architecture_fault, choose_device, choose_dtype
from workers.model.nvidia import (
    VISIBLE_VARIABLE,
    Gpu,
    driver_fault,
    installed_gpus,
    shown_gpus,
    unusable_gpu,
    visible_gpus,
)

GIB = 2**30
GPUS = (
    Gpu("0", "GPU-aaaa", "NVIDIA A100", "535.104.05", 80 * GIB, 40 * GIB),
    Gpu("1", "GPU-bbbb", "NVIDIA T4", "535.104.05", 15 * GIB, None),
)


# --- who has a GPU ----------------------------------------------------------------------------


def test_a_gpu_is_what_nvidia_smi_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning before the table is no GPU, memory may be unknown, and without nvidia-smi there is
    none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == ()
    fake_gpus(tmp_path, monkeypatch, "WARNING: infoROM is corrupted at gpu 0000:01:00.0", *ROWS)
    first, second = installed_gpus()
    a100 = "0", "GPU-aaaa", "NVIDIA A100-SXM4-80GB", "535.104.05"
    assert first == Gpu(*a100, 80 * GIB, 40 * GIB)
    assert (second.name, second.num_bytes, second.num_free) == ("NVIDIA GB10", None, None)
    assert visible_gpus({VISIBLE_VARIABLE: "1"}) == (second,)


@pytest.mark.parametrize(
    ("line", "status", "is_said"),
    [
        ("No devices were found", 6, False),
        ("Failed to initialize NVML: Driver/library version mismatch", 18, True),
    ],
)
def test_a_failing_nvidia_smi_is_no_gpu_and_is_logged(
    line: str,
    status: int,
    is_said: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It says why, unless there is simply no GPU."""
    fake_gpus(tmp_path, monkeypatch, line, status=status)
    assert installed_gpus() == ()
    assert (line in caplog.text) == is_said


@pytest.mark.parametrize(
    ("shown", "indices"),
    [
        (None, "01"),
        ("0,1", "01"),
        ("1, 0", "10"),
        ("1", "1"),
        ("GPU-bb", "1"),
        ("GPU-bbbb,0", "10"),
        ("MIG-1234", "0"),
        ("", ""),
        ("-1", ""),
        ("7", ""),
        ("0,-1,1", "0"),
        ("GPU-cccc,0", ""),
        ("none", ""),
    ],
)
def test_cuda_visible_devices_hides_gpus(shown: str | None, indices: str) -> None:
    """As in CUDA: up to the first unknown id."""
    assert "".join(gpu.index for gpu in shown_gpus(GPUS, shown)) == indices
    assert shown_gpus((), shown) == ()


# --- torch and the driver ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "cuda", "needed"),
    [
        ("535.104.05", "13.0", "580"),
        ("575.57.08", "13.2", "580"),
        ("580.65.06", "13.0", None),
        ("595.10", "13.0", None),
        ("515.43.04", "12.8", "525"),
        ("525.60.13", "12.8", None),
        ("440.33.01", "11.8", "450"),
        ("470.57.02", "11.8", None),
        ("535.104.05", "14.0", None),  # not known here
        ("[N/A]", "13.0", None),
        ("", "13.0", None),
    ],
)
def test_a_driver_may_be_too_old(driver: str, cuda: str, needed: str | None) -> None:
    """The sentence has both versions."""
    fault = driver_fault(driver, cuda)
    if needed is None:
        assert fault is None
    else:
        assert fault is not None
        for part in (f"driver is {driver}", f"CUDA {cuda}", f"needs {needed} or later"):
            assert part in fault


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("release", "is_fault"), [(12080, True), (13000, False), (13020, False)])
def test_a_compatibility_package_makes_an_old_driver_do(
    release: int, is_fault: bool, tmp_path: Path
) -> None:
    """Its libcuda.so.1 comes before the driver's own."""
    source = tmp_path / "libcuda.c"
    source.write_text(f"int cuDriverGetVersion(int *found) {{ *found = {release}; return 0; }}")
    built = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)]
    subprocess.run(built, check=True)
    ask = "from workers.model.nvidia import driver_fault; print(driver_fault('535.1', '13.0'))"
    environ = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "-c", ask], env=environ, capture_output=True, text=True, check=True
    )

    assert ("needs 580 or later" in done.stdout) == is_fault


def test_the_refusal_has_the_true_cause() -> None:
    """The build before the driver, the driver before torch's own words."""
    assert "NVIDIA A100, but torch cannot use it: this torch is built without CUDA" in str(
        unusable_gpu(GPUS, None, "torch's words")
    )
    assert "needs 580 or later" in str(unusable_gpu(GPUS, "13.0", "torch's words"))
    assert str(unusable_gpu(GPUS, "12.8", "torch's words")).endswith("use it: torch's words")
    assert unusable_gpu(GPUS, "12.8") is unusable_gpu((), None) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use this machine's GPU")
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_that_torch_cannot_use_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not float32 on the CPU in silence. What an operator hides, or asks for, is none. The driver
    is named if it is the cause, otherwise torch's own words are."""
    fake_gpus(tmp_path, monkeypatch, ROWS[0])
    options = EngineOptions(model_path=str(demo_model_path()), device=name)
    with pytest.raises(ModelRefused) as refused:
        loader.load_model(options, lambda text: None)
    assert "nvidia-smi sees NVIDIA A100-SXM4-80GB, but torch cannot use it" in str(refused.value)
    assert str(refused.value).endswith("to compute on the CPU give --device cpu")
    for cuda, words in (("13.0", "535.104.05"), ("12.8", "CUDA enabled")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(ModelRefused, match=words):
            choose_device(name)
    assert choose_device("cpu").type == "cpu"
    monkeypatch.setenv(VISIBLE_VARIABLE, "")
    if name == "auto":
        assert choose_device(name).type == "cpu"
    else:
        with pytest.raises(ModelRefused, match="torch finds no CUDA device"):
            choose_device(name)


# --- compute capability -----------------------------------------------------------------------

BUILT = ("sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "sm_120", "compute_120")


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((7, 5), BUILT, True),
        ((7, 0), BUILT, False),  # V100
        ((6, 1), BUILT, False),
        ((8, 0), BUILT, True),
        ((8, 9), BUILT, True),  # by sm_86
        ((9, 0), BUILT, True),
        ((10, 3), BUILT, True),
        ((12, 1), BUILT, True),
        ((13, 0), BUILT, True),  # translated
        ((9, 1), ("sm_90a",), False),
        ((11, 0), ("sm_100", "sm_120"), False),
        ((8, 0), ("sm_86",), False),
        ((9, 0), (), True),  # unknown
        ((9, 0), ("gfx90a", "gfx942"), True),  # AMD's: unknown
    ],
)
def test_torch_has_kernels_for_some_gpus(
    capability: tuple[int, int], built_for: tuple[str, ...], runs: bool
) -> None:
    fault = architecture_fault(capability, built_for)
    assert (fault is None) == runs
    if fault is not None:
        assert ".".join(map(str, capability)) in fault
        assert built_for[0] in fault


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("capability", [None, (7, 5), (8, 0), (8, 9), (12, 0)])
def test_auto_takes_a_type_that_the_device_has(
    own: torch.dtype | None, capability: tuple[int, int] | None
) -> None:
    """A T4 has no bfloat16."""
    found = choose_dtype("auto", LlamaConfig(dtype=own), capability)
    if capability is None:
        assert found == torch.float32
    elif own == torch.float16 or capability < (8, 0):
        assert found == torch.float16
    else:
        assert found == torch.bfloat16


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_bfloat16_is_refused_where_the_gpu_has_none(capability: tuple[int, int]) -> None:
    """By the capability that it has, and what helps."""
    with pytest.raises(ModelRefused) as refused:
        choose_dtype("bfloat16", LlamaConfig(), capability)
    assert f"this one has {'.'.join(map(str, capability))}: give --dtype float16" in str(
        refused.value
    )
    for name in ("float16", "float32"):
        assert choose_dtype(name, LlamaConfig(), capability) == getattr(torch, name)
    for elsewhere in (None, (8, 0), (9, 0)):
        assert choose_dtype("bfloat16", LlamaConfig(), elsewhere) == torch.bfloat16


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("needed", "num_free", "fits"),
    [(0, 0, True), (GIB, GIB, True), (GIB + 1, GIB, False), (141 * GIB, 79 * GIB, False)],
)
def test_weights_must_fit_into_what_is_free(
    kind: str, needed: int, num_free: int, fits: bool
) -> None:
    if fits:
        memory.check_free(torch.device(kind), needed, num_free)
        return
    with pytest.raises(ModelRefused) as refused:
        memory.check_free(torch.device(kind), needed, num_free)
    for part in (f"need {needed / GIB:.3g} GiB", f"{kind} has {num_free / GIB:.3g} GiB free"):
        assert part in str(refused.value)
    assert ("tensor_parallel_size" in str(refused.value)) == (kind == "cuda")


@pytest.mark.parametrize("options", [{}, {"memory_share": 0.5}, {"kv_memory_bytes": 2**20}])
def test_weights_that_do_not_fit_are_not_read(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the options of memory. The demo model's take 4.1 MB in float32, half in bfloat16."""

    class Read(MemoryError):  # others become refusals
        pass

    def read(*_: object) -> NoReturn:
        raise Read

    def load(dtype: str) -> None:
        given = EngineOptions(
            model_path=str(demo_model_path()), device="cpu", dtype=dtype, **options
        )
        loader.load_model(given, lambda text: None)

    monkeypatch.setattr(memory, "free_cpu_bytes", lambda: 3 * 10**6)
    monkeypatch.setattr(loader, "load_decoder", read)
    with pytest.raises(ModelRefused, match=r"the weights need 0.00379 GiB, and cpu has 0.00279"):
        load("float32")
    with pytest.raises(Read):
        load("bfloat16")


def test_cached_files_of_a_container_are_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that were just downloaded fill the cache."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    (tmp_path / "memory.current").write_text(f"{2**20}\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 5000\nactive_file 700\n")
    assert machine.free_cpu_bytes() == 5700


def test_nvidia_smi_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take seconds."""
    fake_gpus(tmp_path, monkeypatch, ROWS[0])
    assert len(installed_gpus()) == 1
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")
    assert len(installed_gpus()) == 1
