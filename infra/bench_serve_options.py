"""Options of `batchway bench serve`; infra/bench measures."""

import argparse
from pathlib import Path

from infra.option_values import http_url, integer, lengths, number, share
from infra.options import add_json_option


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    _add_server_options(parser.add_argument_group("the server"))
    _add_what_options(parser.add_argument_group("what is asked"))
    _add_when_options(parser.add_argument_group("when it is asked"))
    _add_result_options(parser.add_argument_group("what is told"))
    add_json_option(parser)


def _add_server_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--base-url",
        type=http_url,
        default="http://127.0.0.1:8000/v1",
        metavar="URL",
        help="of the API, with its version (default: http://127.0.0.1:8000/v1)",
    )
    group.add_argument("--model", metavar="NAME", help="(default: the first that the server lists)")
    group.add_argument(
        "--plain",
        action="store_true",
        help="send nothing that OpenAI does not have: answers may then end early "
        "(default: ignore_eos and return_token_ids)",
    )
    group.add_argument(
        "--timeout-s",
        type=number(may_be_zero=False),
        default=120.0,
        metavar="SECONDS",
        help="a call that brings no byte for so long has failed (default: 120 s)",
    )


def _add_what_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workload",
        type=Path,
        metavar="FILE",
        help="requests as of `batchway bench engine`, instead of drawn ones (default: drawn)",
    )
    group.add_argument(
        "--requests", type=integer(1), default=100, metavar="N", help="drawn (default: 100)"
    )
    for name, text in (("prompt", "16:512"), ("output", "8:256")):
        group.add_argument(
            f"--{name}-tokens",
            type=lengths,
            default=lengths(text),
            metavar="LOW:HIGH",
            help=f"{name} lengths in tokens, log-uniform; N: all alike (default: {text})",
        )
    group.add_argument(
        "--prompt",
        choices=("ids", "text", "chat"),
        default="ids",
        help="ids: token ids to /completions; text: as many words; chat: words to "
        "/chat/completions (default: ids)",
    )
    group.add_argument(
        "--vocab-size",
        type=integer(5),
        default=256,
        metavar="N",
        help="drawn token ids are 4 to N - 1 (default: 256)",
    )
    group.add_argument(
        "--cancel-share",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="of the callers that hang up in the middle of their answer, 0 to 1 (default: 0)",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of all that is drawn (default: 0)"
    )


def _add_when_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rate",
        type=number(may_be_zero=False),
        nargs="+",
        metavar="PER_S",
        help="requests per second, an open loop; several are run one after another "
        "(default: a closed loop)",
    )
    group.add_argument(
        "--arrivals",
        choices=("poisson", "gamma", "constant"),
        default="poisson",
        help="how gaps between requests are drawn (default: poisson)",
    )
    group.add_argument(
        "--burstiness",
        type=number(may_be_zero=False),
        default=0.5,
        metavar="SHAPE",
        help="of --arrivals gamma: 1 is Poisson, less comes in bursts, more comes evenly "
        "(default: 0.5)",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="arrivals and lengths from a CSV file with the columns arrival_s, prompt_tokens and "
        "max_tokens; with --rate its lengths alone (default: none)",
    )
    group.add_argument(
        "--max-concurrency",
        type=integer(1),
        metavar="N",
        help="calls at a time; in an open loop others wait beyond their arrival "
        "(default: 16 callers in a closed loop, no limit in an open one)",
    )
    group.add_argument(
        "--warm-up",
        type=integer(0),
        default=4,
        metavar="N",
        help="requests that are sent first and not counted (default: 4)",
    )


def _add_result_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo-ttft-ms",
        type=number(may_be_zero=False),
        metavar="MS",
        help="goodput counts answers whose first token came within it, from arrival (default: any)",
    )
    group.add_argument(
        "--slo-itl-ms",
        type=number(may_be_zero=False),
        metavar="MS",
        help="and whose mean time per token after the first is within it (default: any)",
    )
    group.add_argument(
        "--csv", type=Path, metavar="OUT", help="one line for each request (default: none)"
    )
    group.add_argument(
        "--png",
        type=Path,
        metavar="OUT",
        help="curve over the rates, distributions, timelines (default: none)",
    )
