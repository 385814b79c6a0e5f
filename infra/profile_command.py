"""Options and tables of `batchway profile`; workers/profiling measures."""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from infra import options as opts
from infra.preconditions import check_extra, make_folder
from infra.tables import table, write
from workers.engine.interface import ModelRefused

_HEADING = (
    "class", "step ms", "p99", "tokens", "seqs", "least by memory", "by compute", "bound by",
    "of the roof", "no operator", "not the model",
)  # fmt: skip


def add_profile_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the measured streams")
    table = {
        "streams": opts.Option("sequences that decode together", opts.COUNT, 32),
        "prompt_tokens": opts.Option("tokens of each prompt", opts.COUNT, 256),
        "trace": opts.Option(
            "write decode.json, mixed.json and prefill.json there, for chrome://tracing or "
            "Perfetto",
            opts.Value(Path, "DIR"),
            shown="no traces",
        ),
        "fit": opts.Option(
            "write step times there, for `batchway simulate --costs`", opts.FILE, shown="no"
        ),
    }
    opts.add_options(group, table)
    opts.add_options(parser, opts.JSON)
    opts.add_model_options(parser)


def run_profile(options: argparse.Namespace) -> int:
    check_extra("worker")
    from workers.model.folder_check import check_folder

    opts.choose_gpu(options)
    make_folder(options)
    check_folder(options.model)
    # Imported by name: the command line itself must not load torch.
    profiling: Any = importlib.import_module("workers.profiling")
    load = profiling.ProfiledLoad(options.streams, options.prompt_tokens)
    try:
        found = profiling.take_profile(opts.engine_options(options), load, options.trace)
    except (ModelRefused, profiling.CannotProfile) as exc:
        print(f"batchway profile: {exc}", file=sys.stderr)
        return 1
    if options.fit is not None:
        costs: Any = importlib.import_module("infra.planning.costs")
        costs.fit_steps(found.steps, found.room).write(options.fit)
    write(found.as_dict(), _text(found), options.json)
    return 0


def limits_line(machine: Any, shape: Any) -> str:
    """The limits of a machine and the sizes of a model, as workers/profiling measures them."""
    return (
        f"{machine.device}, {machine.dtype}, {machine.num_threads} threads: "
        f"reads {machine.bytes_per_s / 1e9:.1f} GB/s, computes {machine.flops_per_s / 1e9:,.0f} "
        f"GFLOP/s; weights {shape.weight_bytes / 1e6:,.1f} MB, "
        f"KV {shape.kv_bytes_per_token / 1e3:.1f} kB a token"
    )


def _text(found: Any) -> str:
    head = limits_line(found.machine, found.shape)
    parts = [head, table([_HEADING, *(_row(finding) for finding in found.findings)])]
    for finding in found.findings:
        rows = [("operator", "own time", "calls")]
        rows += [(o.name[:60], f"{o.share:.1%}", str(o.num_calls)) for o in finding.operators]
        parts.append(f"{finding.kind}\n{table(rows)}")
    return "\n\n".join([*parts, found.advice])


def _row(finding: Any) -> tuple[str, ...]:
    return (
        finding.kind,
        _ms(finding.step_s),
        _ms(finding.p99_s),
        f"{finding.num_tokens:.0f}",
        f"{finding.num_seqs:.0f}",
        _ms(finding.memory_s),
        _ms(finding.compute_s),
        finding.bound.value,
        f"{finding.efficiency:.0%}",
        f"{finding.gap_share:.0%}",
        f"{finding.outside_s / finding.step_s:.0%}",
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"
