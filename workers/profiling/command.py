"""`batchway profile`: loads a model, measures the machine and each class of step, and advises."""

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from workers.engine.interface import ModelRefused
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions
from workers.model.loader import load_model
from workers.model.runner import ModelRunner
from workers.profiling.demand import Shape, shape_of
from workers.profiling.findings import ClassFinding, advice
from workers.profiling.machine import Machine, measure
from workers.profiling.window import KINDS, Load, Watched, Windows, find

_TIMED_STEPS = 50  # of each class
_PROFILED_STEPS = 8  # of each class, under torch's profiler


class CannotProfile(Exception):
    """The engine cannot be profiled. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The results of `batchway profile`."""

    machine: Machine
    shape: Shape
    findings: tuple[ClassFinding, ...]
    advice: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "findings": [
                asdict(f) | {"bound": f.bound.value, "efficiency": f.efficiency}
                for f in self.findings
            ]
        }


def take_profile(
    options: EngineOptions, load: Load, num_profiled: int, trace_dir: Path | None
) -> Profile:
    """Takes the profile of a model. Raises ModelRefused, CannotProfile."""
    options = msgspec.structs.replace(options, ahead=False)
    loaded = load_model(options, lambda text: print(text, file=sys.stderr))
    runner = loaded.model
    if not isinstance(runner, ModelRunner):
        raise CannotProfile("only models with paged attention are profiled")
    longest = load.num_prompt_tokens + load.num_output_tokens
    if longest > runner.max_model_len:
        raise CannotProfile(
            f"{load.num_prompt_tokens} tokens of prompt and {load.num_steps} steps need a context "
            f"of {longest} tokens, and this model has {runner.max_model_len}: ask for fewer"
        )
    keys = next(iter(runner.cache.layers.values())).keys
    machine = measure(keys.device, keys.dtype)
    shape = shape_of(runner)
    model = Watched(runner, shape, keys.device)
    engine = build_engine(model, loaded.vocab_size, options, loaded.num_step_tokens)
    windows = Windows(engine, model, loaded.vocab_size, load)
    findings = tuple(
        find(windows, kind, machine, load.num_steps, num_profiled, trace_dir) for kind in KINDS
    )
    is_gpu = keys.device.type == "cuda"
    return Profile(machine, shape, findings, advice(findings, is_gpu))


def profile_for(options: argparse.Namespace, engine_options: EngineOptions) -> Profile:
    """Runs the profile of the command line. Raises ModelRefused, CannotProfile."""
    load = Load(options.streams, options.prompt_tokens, _TIMED_STEPS)
    try:
        return take_profile(engine_options, load, _PROFILED_STEPS, options.trace)
    except torch.OutOfMemoryError as exc:
        raise CannotProfile("the device has too little memory for this") from exc


__all__ = ["CannotProfile", "ModelRefused", "profile_for", "take_profile"]
