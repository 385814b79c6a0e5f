"""Options of `batchway bench`, `batchway compare` and `batchway cascade fit`.

Over 300 lines: each option has its own help, which docs/options.md shows. Imports no command: some
load torch, others need an extra.
"""

import argparse
import importlib
from pathlib import Path

from infra.demo_model import demo_model_path
from infra.option_values import http_url, integer, number
from infra.options import JSON, MODEL, add_length_options, add_options

_LOADS = [0.5, 0.8]


def run_command(name: str, options: argparse.Namespace) -> int:
    """Runs a command of a module of this package."""
    command = importlib.import_module(f"infra.measure.{name}")
    status: int = command.run(options)
    return status


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


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    _add_server_options(parser.add_argument_group("the server"))
    _add_what_options(parser.add_argument_group("the requests"))
    _add_when_options(parser.add_argument_group("arrival times"))
    _add_result_options(parser.add_argument_group("the results"))
    add_options(parser, JSON)


def _add_server_options(group: argparse._ArgumentGroup) -> None:
    _add_base_url_option(group)
    group.add_argument("--model", metavar="NAME", help="(default: the first that the server lists)")
    group.add_argument(
        "--plain",
        action="store_true",
        help="send only OpenAI's own fields; answers may then end early "
        "(default: ignore_eos and return_token_ids)",
    )
    group.add_argument(
        "--timeout-s",
        type=number(may_be_zero=False),
        default=120.0,
        metavar="SECONDS",
        help="a call fails after this time without a byte (default: 120 s)",
    )


def _add_what_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workload",
        type=Path,
        metavar="FILE",
        help="a workload file of `batchway bench engine` (default: random requests)",
    )
    group.add_argument(
        "--requests",
        type=integer(1),
        default=100,
        metavar="N",
        help="random requests (default: 100)",
    )
    add_length_options(group, "16:512", "8:256")
    group.add_argument(
        "--prompt",
        choices=("ids", "text", "chat"),
        default="ids",
        help="ids: token ids to /completions; text: words to /completions; chat: words to "
        "/chat/completions (default: ids)",
    )
    group.add_argument(
        "--vocab-size",
        type=integer(5),
        default=256,
        metavar="N",
        help="random token ids are 4 to N - 1 (default: 256)",
    )
    group.add_argument(
        "--cancel-share",
        type=number(may_be_zero=True, most=1),
        default=0.0,
        metavar="SHARE",
        help="share of callers that disconnect during their answer, 0 to 1 (default: 0)",
    )
    _add_seed_option(group)


def _add_when_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rate",
        type=number(may_be_zero=False),
        nargs="+",
        metavar="PER_S",
        help="requests per second of an open loop; several rates run one after another "
        "(default: a closed loop)",
    )
    group.add_argument(
        "--arrivals",
        choices=("poisson", "gamma", "constant"),
        default="poisson",
        help="distribution of the gaps between requests (default: poisson)",
    )
    group.add_argument(
        "--burstiness",
        type=number(may_be_zero=False),
        default=0.5,
        metavar="SHAPE",
        help="shape of --arrivals gamma: 1 is Poisson, less is burstier, more is smoother "
        "(default: 0.5)",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="arrivals and lengths from a CSV file with the columns arrival_s, prompt_tokens and "
        "max_tokens; with --rate only its lengths are used (default: none)",
    )
    group.add_argument(
        "--max-concurrency",
        type=integer(1),
        metavar="N",
        help="calls at a time; in an open loop further requests are sent late "
        "(default: 16 callers in a closed loop, no limit in an open one)",
    )
    group.add_argument(
        "--warm-up",
        type=integer(0),
        default=4,
        metavar="N",
        help="uncounted requests that are sent first (default: 4)",
    )


def _add_result_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo-ttft-ms",
        type=number(may_be_zero=False),
        metavar="MS",
        help="goodput counts only answers whose first token came within this time (default: any)",
    )
    group.add_argument(
        "--slo-itl-ms",
        type=number(may_be_zero=False),
        metavar="MS",
        help="and whose mean time per later token is within this time (default: any)",
    )
    group.add_argument(
        "--csv", type=Path, metavar="OUT", help="write one line for each request (default: none)"
    )
    group.add_argument(
        "--png",
        type=Path,
        metavar="OUT",
        help="plot rates, distributions and timelines (default: none)",
    )


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
    add_length_options(group, "16:128", "4:128")
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
    _add_seed_option(group)
    parser.add_argument(
        "--png",
        type=Path,
        metavar="OUT",
        help="plot results; needs the extra bench (default: none)",
    )
    add_options(parser, JSON)


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
    add_options(group, MODEL, "dtype")
    group.add_argument(
        "--threads", type=integer(1), metavar="N", help="CPU threads (default: torch's own)"
    )
    add_options(group, MODEL, "kv_cache_gib")


def add_cascade_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="WHAT")
    fit = actions.add_parser(
        "fit",
        help="choose the threshold of a cascade of two models on questions with known answers",
        description="Asks both members of a cascade each question of --data, or reads what was "
        "measured before, and finds the cheapest threshold that keeps the target quality. The API "
        "key is the variable BATCHWAY_API_KEY, else OPENAI_API_KEY. Exit status 1 if no threshold "
        "keeps the target.",
    )
    fit.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines: a body with `prompt` or `messages`, and `answer`, the right text, or an "
        "object whose fields the answer must have; or lines that --save wrote (default: none, "
        "required)",
    )
    fit.add_argument(
        "--target-quality",
        type=number(may_be_zero=False, most=1.0),
        default=0.98,
        metavar="SHARE",
        help="of the last member's quality (default: 0.98)",
    )
    _add_asking_options(fit.add_argument_group("asking the members"))
    fit.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the resampling (default: 0)"
    )
    fit.add_argument(
        "--png", type=Path, metavar="OUT", help="plot cost and quality (default: none)"
    )
    add_options(fit, JSON)


def _add_asking_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--models",
        type=Path,
        metavar="FILE",
        help="the models.yaml with the cascade; its threshold is not used (default: none, for data "
        "that --save wrote)",
    )
    group.add_argument(
        "--flow", metavar="NAME", help="the cascade's name (default: the file's only cascade)"
    )
    _add_base_url_option(group)
    group.add_argument(
        "--token-costs",
        type=number(may_be_zero=True),
        nargs=2,
        metavar=("FIRST", "LAST"),
        help="cost of a token, read or written, of each member, in any unit (default: a call costs "
        "its seconds)",
    )
    group.add_argument(
        "--max-concurrency",
        type=integer(1),
        default=4,
        metavar="N",
        help="concurrent calls (default: 4)",
    )
    group.add_argument(
        "--save",
        type=Path,
        metavar="OUT",
        help="write confidence, quality and cost of each answer as JSON lines, without any text, "
        "for --data (default: none)",
    )


def _add_base_url_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--base-url",
        type=http_url,
        default="http://127.0.0.1:8000/v1",
        metavar="URL",
        help="base URL of the API, with its version (default: http://127.0.0.1:8000/v1)",
    )


def _add_seed_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of all random choices (default: 0)"
    )
