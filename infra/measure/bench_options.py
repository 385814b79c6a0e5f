"""Options of `batchway bench`."""

import argparse
import importlib
from pathlib import Path

from infra.measure.serve_options import add_serve_options
from infra.option_values import integer
from infra.options import JSON, MODEL, add_options


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    engine = benches.add_parser(
        "engine",
        help="run a workload file through the engine alone: no Redis, no HTTP",
        description="Runs a workload through the engine in this process and prints output tokens "
        "per second, and latencies in milliseconds. Greedy; end tokens are ignored.",
    )
    engine.add_argument("--model", required=True, metavar="DIR", help="folder or Hub name")
    engine.add_argument(
        "--workload",
        required=True,
        type=Path,
        metavar="FILE",
        help='JSON: {"requests": [{"prompt_token_ids": [...], "max_tokens": N, '
        '"arrival_s"?: S}, ...]}',
    )
    add_options(engine, MODEL, "dtype", "quantization")
    engine.add_argument(
        "--max-running",
        type=integer(1),
        default=32,
        metavar="N",
        help="the most sequences that run at once (default: 32)",
    )
    engine.add_argument(
        "--max-batched-tokens",
        type=integer(1),
        default=None,
        metavar="N",
        help="token budget of a step (default: chosen for the device)",
    )
    engine.add_argument(
        "--strategy",
        default="continuous",
        choices=("continuous", "static", "dynamic"),
        help="how sequences are batched (default: continuous)",
    )
    engine.add_argument(
        "--threads",
        type=integer(1),
        default=None,
        metavar="N",
        help="threads (default: torch's)",
    )
    engine.add_argument(
        "--torch-only",
        action="store_true",
        help="no merged modules and no kernels of batchway's own",
    )
    add_options(engine, JSON)
    add_serve_options(
        benches.add_parser(
            "serve",
            help="put load on this server, or any with OpenAI's completions API, over HTTP",
            description="Sends requests at arrival times (--rate, --trace or a workload's: an open "
            "loop), or from a fixed number of callers (a closed loop), and reports throughput and "
            "latencies. The API key is the variable BATCHWAY_API_KEY, else OPENAI_API_KEY. "
            "Exit status 1 if no request succeeded.",
        )
    )


def run_bench(options: argparse.Namespace) -> int:
    # Imported by name: the command line itself must not load torch.
    command = importlib.import_module(f"infra.measure.{options.bench}_command")
    status: int = command.run(options)
    return status
