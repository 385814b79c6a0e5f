"""Options of `batchway compare`."""

import argparse
import importlib
from pathlib import Path

from infra import options as opts
from infra.demo_model import demo_model_path
from infra.option_values import integer, number

_LOADS = [0.5, 0.8]


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    _add_model_options(parser.add_argument_group("the model and the strategies"))
    group = parser.add_argument_group("the workload")
    group.add_argument(
        "--workload",
        type=Path,
        metavar="FILE",
        help="a workload file of `batchway bench engine`, without its arrival times "
        "(default: random requests)",
    )
    group.add_argument(
        "--requests",
        type=integer(1),
        default=96,
        metavar="N",
        help="random requests in each run (default: 96)",
    )
    opts.add_length_options(group, "16:128", "4:128")
    group.add_argument(
        "--load",
        type=number(may_be_zero=False),
        nargs="*",
        default=_LOADS,
        metavar="SHARE",
        help="rates of Poisson arrivals, as shares of the best strategy's requests per second with "
        "all requests at once (default: 0.5 0.8)",
    )
    group.add_argument(
        "--rounds",
        type=integer(1),
        default=3,
        metavar="N",
        help="rounds, each with all strategies in turn; reports medians (default: 3)",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of all random choices (default: 0)"
    )
    parser.add_argument(
        "--png",
        type=Path,
        metavar="OUT",
        help="plot results; needs the extra bench (default: none)",
    )
    opts.add_options(parser, opts.JSON)


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        default=str(demo_model_path()),
        metavar="PATH_OR_HUB_ID",
        help="a folder in Hugging Face layout, or an id on its hub (default: the built-in demo)",
    )
    group.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="compare this batching.yaml too; may be repeated (default: the three strategies)",
    )
    group.add_argument(
        "--flat",
        action="store_true",
        help="compute static and dynamic batches without padding, as this engine serves "
        "(default: padded to rectangles)",
    )
    group.add_argument(
        "--max-running",
        type=integer(1),
        default=16,
        metavar="N",
        help="the most sequences that run at once, and the size of a full batch; overrides files "
        "(default: 16)",
    )
    opts.add_options(group, opts.MODEL, "dtype")
    group.add_argument(
        "--threads", type=integer(1), metavar="N", help="CPU threads (default: torch's own)"
    )
    opts.add_options(group, opts.MODEL, "kv_cache_gib")


def run_compare(options: argparse.Namespace) -> int:
    # Imported by name: the command line itself must not load torch.
    command = importlib.import_module("infra.measure.compare_command")
    status: int = command.run(options)
    return status
