"""Options of `batchway bench serve`."""

import argparse
from pathlib import Path

from infra.option_values import http_url, integer, number
from infra.options import JSON, add_length_options, add_options


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    _add_server_options(parser.add_argument_group("the server"))
    _add_what_options(parser.add_argument_group("the requests"))
    _add_when_options(parser.add_argument_group("arrival times"))
    _add_result_options(parser.add_argument_group("the results"))
    add_options(parser, JSON)


def _add_server_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--base-url",
        type=http_url,
        default="http://127.0.0.1:8000/v1",
        metavar="URL",
        help="base URL of the API, with its version (default: http://127.0.0.1:8000/v1)",
    )
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
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of all random choices (default: 0)"
    )


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
