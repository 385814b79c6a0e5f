"""Numbers of a step go to the device from one pinned place, so that no copy waits for it."""

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import workers.model
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.workers.model.driver import allot_blocks, make_prompts, make_sequence, run_step
from workers.ipc.messages import EngineOptions
from workers.model.ahead.runner import AheadRunner
from workers.model.loader import load_model

FOLDER = Path(workers.model.__file__).parent
# What runs in each step on a GPU. At load and on a CPU a copy may wait.
STEP_MODULES = [
    "attention/packed", "attention/reference", "attention/triton_attention",
    "attention/triton_attention", "attention/varlen", "ahead/runner", "ahead/runner",
    "gpu/drawing", "gpu/kernels", "gpu/request_state", "kv_cache",
    "noise", "penalties", "runner", "sampler", "surgery/stack",
]  # fmt: skip
_COPYING = {"as_tensor", "cpu", "cuda", "from_numpy", "item", "new_tensor", "pin_memory", "tensor"}


def copies(source: str) -> list[str]:
    """The calls that may copy between host and device by themselves."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = []
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        to_a_device = name == "to" and any("device" in ast.unparse(part) for part in call.args)
        if name in _COPYING or to_a_device:
            found.append(ast.unparse(call))
    return found


@pytest.mark.parametrize("name", STEP_MODULES)
def test_a_step_s_numbers_go_through_one_place(name: str) -> None:
    """`staging.to_device`. What the host reads, the sampled tokens, comes by `HostCopy` or
    `tolist`."""
    assert copies((FOLDER / f"{name}.py").read_text()) == []


def test_other_copies_would_be_found() -> None:
    lines = ("torch.tensor([1], device=device)", "x.to(self._device)", "torch.from_numpy(x)")
    for line in lines:
        assert copies(line) == [line]
    assert copies("x.to(keys.dtype)") == copies("to_device(x, device)") == []


class _Indexes(TorchFunctionMode):
    """Refuses to index a tensor by a list or an array, which torch would copy by itself."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(part, list | np.ndarray) for part in index), index
        return func(*args, **(kwargs or {}))


def test_no_step_indexes_by_numbers_of_the_host(tmp_path: Path) -> None:
    """Prompts with and without log probabilities, beside streams that are sampled in every way; by
    the plain runner, and by the one that runs ahead."""
    wishes: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"prompt_logprobs": 1, "logprobs": 2},
        {"repetition_penalty": 1.2, "logit_bias": {5: 1.0}},
    ]
    folder = save_tiny_model("llama", tmp_path)
    for is_ahead in (False, True):
        options = EngineOptions(
            model_path=str(folder), device="cpu", max_num_seqs=8, ahead=is_ahead, fused=False
        )
        model: Any = load_model(options, lambda text: None).model
        prompts = make_prompts([9, 20, 5, 12, 7], VOCAB_SIZE)
        sequences = [make_sequence(p, **w) for p, w in zip(prompts, wishes, strict=True)]
        allot_blocks(sequences, model)
        with _Indexes():
            for number in (1, 3, 5, 5, 5):
                run_step(model, sequences[:number], chunk_tokens=8)


def test_an_index_by_a_list_would_be_found() -> None:
    with _Indexes(), pytest.raises(AssertionError):
        torch.zeros(3)[[0, 2]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_step_waits_for_the_device(tmp_path: Path) -> None:
    """Prompts, streams, and both together, with all that changes logits, on a GPU; torch reports
    every operation that waits."""
    options = EngineOptions(model_path=str(save_tiny_model("llama", tmp_path)), max_num_seqs=4)
    model: Any = load_model(options, lambda text: None).model
    assert isinstance(model, AheadRunner)
    wishes: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2},
        {"frequency_penalty": 0.5, "logit_bias": {5: 1.0}, "min_tokens": 9},
    ]
    prompts = make_prompts([9, 20], VOCAB_SIZE)
    sequences = [make_sequence(p, **w) for p, w in zip(prompts, wishes, strict=True)]
    allot_blocks(sequences, model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in (1, 1, 2, 2, 2, 2):
            run_step(model, sequences[:number], chunk_tokens=8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
