"""Options of `batchway cascade fit`."""

import argparse
import importlib
from pathlib import Path

from infra.option_values import http_url, integer, number
from infra.options import JSON, add_options


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
    group.add_argument(
        "--base-url",
        type=http_url,
        default="http://127.0.0.1:8000/v1",
        metavar="URL",
        help="base URL of the API, with its version (default: http://127.0.0.1:8000/v1)",
    )
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


def run_cascade(options: argparse.Namespace) -> int:
    # Imported by name: what it needs is an extra.
    command = importlib.import_module("infra.measure.cascade_command")
    status: int = command.run(options)
    return status
