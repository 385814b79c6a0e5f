"""`python -m tests.chaos --faults N --seed S --json OUT`: a campaign from the command line.

Exit status 0 where nothing was violated, 1 where something was, 130 after a Ctrl-C.
"""

import argparse
import sys
from dataclasses import replace

from tests.campaigns.command_line import parser_of, run
from tests.chaos.campaign import (
    BATCH_CALLERS,
    CALLERS,
    FEW_CALLERS,
    FLOW_CALLERS,
    CampaignOptions,
    run_campaign,
)
from tests.chaos.clients import Messenger
from tests.chaos.faults import KINDS
from tests.chaos.fleet import FleetOptions
from tests.vllm_environment import interpreter


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if options.model == "vllm" and not interpreter().exists():
        parser.error("vLLM is not installed: scripts/setup-vllm")
    if options.flows and options.model != "hash":
        parser.error("flows are called on the hash model")
    campaign = CampaignOptions(
        num_faults=options.faults,
        seed=options.seed,
        model=options.model,
        fsync=options.fsync,
        mean_gap_s=options.gap_s,
        keeps_logs=options.keep_logs,
        kinds=tuple(options.only or ()),
        flows=options.flows,
        batch_lines=options.batches,
    )
    if options.cluster:
        fleet = FleetOptions(num_workers=5, num_partitions=4, awaits=options.cluster == "awaited")
        campaign = replace(campaign, fleet=fleet)
    if options.model == "demo":  # whose texts do not tell its tokens
        others = {kind: num for kind, num in CALLERS.items() if kind is not Messenger}
        campaign = replace(campaign, callers=others)
    if options.model == "vllm":  # whose next start needs the cores more than callers do
        campaign = replace(campaign, callers=FEW_CALLERS)
    if options.flows:  # each of which takes three times as long
        campaign = replace(campaign, callers=FLOW_CALLERS)
    if options.batches:
        campaign = replace(campaign, callers=BATCH_CALLERS)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    return run(lambda: run_campaign(campaign, say), options.json)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("chaos", __doc__)
    parser.add_argument("--faults", type=int, default=100, help="how many (default: 100)")
    parser.add_argument(
        "--model",
        choices=("hash", "demo", "vllm"),
        default="hash",
        help="that workers run: the hash model, the demo model, or the demo model on vLLM",
    )
    parser.add_argument(
        "--fsync",
        choices=("always", "everysec"),
        default="always",
        help="of Redis; with everysec a power cut loses up to its last second",
    )
    parser.add_argument(
        "--cluster",
        choices=("awaited", "asynchronous"),
        help="three primaries with replicas and four partitions; whether replicas are awaited",
    )
    parser.add_argument("--gap-s", type=float, default=0.4, help="mean time between two faults")
    parser.add_argument(
        "--only", action="append", choices=KINDS, metavar="KIND", help="of faults; may be repeated"
    )
    parser.add_argument("--flows", action="store_true", help="call the hash model through flows")
    parser.add_argument(
        "--batches",
        type=int,
        default=0,
        metavar="LINES",
        help="a batch of this many lines, by default with kill -9 alone; give --gap-s",
    )
    parser.add_argument("--keep-logs", action="store_true", help="of all processes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
