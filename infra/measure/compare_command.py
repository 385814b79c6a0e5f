"""`batchway compare`: the same workload and model with each batching strategy."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from infra.measure.compare import Candidate, compare
from infra.measure.compare_report import comparison_tables, summarise_trials
from infra.measure.engine import RequestFailed
from infra.measure.workloads import (
    BadWorkload,
    Workload,
    arriving,
    log_uniform_workload,
    read_workload,
)
from infra.tables import progress_line, write
from workers import configuration
from workers.configuration import ConfigurationError
from workers.engine.interface import ModelRefused
from workers.engine.request import RequestRefused
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions, StrategyOptions
from workers.model.loader import load_model

_GIB = 2**30


def run(options: argparse.Namespace) -> int:
    """Measures, prints, writes; returns 1 if answers differ."""
    try:
        base = _base_options(options)
        ways = _ways(options, base)
        loaded = load_model(base, lambda text: print(text, file=sys.stderr))
        trials = compare(
            [
                Candidate(name, partial(build_engine, loaded.model, loaded.vocab_size, way))
                for name, way in ways
            ],
            make_workload(options, loaded.vocab_size),
            loaded.vocab_size,
            loads=options.load,
            num_rounds=options.rounds,
            seed=options.seed,
            progress=progress_line("runs"),
        )
    except (
        BadWorkload, ConfigurationError, ModelRefused, RequestFailed, RequestRefused,
    ) as exc:  # fmt: skip
        print(f"batchway compare: {exc}", file=sys.stderr)
        return 1
    return report(
        {"model": options.model, "seed": options.seed, **summarise_trials(trials)}, options
    )


def report(found: dict[str, Any], options: argparse.Namespace) -> int:
    write(found, comparison_tables(found), options.json)
    if options.png is not None:
        from infra.measure.compare_plot import draw_comparison

        draw_comparison(found, options.png)
    return 0 if found["is_alike"] else 1


def make_workload(options: argparse.Namespace, vocab_size: int) -> Workload:
    """Returns the workload. Raises BadWorkload. Ignores a file's arrival times: loads are drawn."""
    if options.workload is not None:
        workload = read_workload(options.workload)
        return arriving(workload, [0.0] * len(workload.requests))
    return log_uniform_workload(
        options.requests,
        vocab_size,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        seed=options.seed,
    )


def _base_options(options: argparse.Namespace) -> EngineOptions:
    memory = options.kv_cache_gib and int(options.kv_cache_gib * _GIB)
    return EngineOptions(
        model_path=options.model,
        dtype=options.dtype,
        kv_memory_bytes=memory,
        max_num_seqs=options.max_running,
        num_threads=options.threads,
    )


def _ways(options: argparse.Namespace, base: EngineOptions) -> Sequence[tuple[str, EngineOptions]]:
    """Returns name and options of each strategy or file. Raises ConfigurationError."""
    ways = []
    for name in ("static", "dynamic", "continuous"):
        is_padded = not options.flat and name != "continuous"
        strategy = StrategyOptions(
            name=name,
            batch_size=options.max_running,
            padded=is_padded,
        )
        shown = f"{name}, padded" if is_padded else name
        ways.append((shown, msgspec.structs.replace(base, strategy=strategy)))
    ways += [(path.stem, configuration.load(path).apply(base)) for path in options.config]
    return ways
