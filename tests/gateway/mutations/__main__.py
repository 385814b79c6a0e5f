"""Mutated bodies of accepted requests: `python -m tests.gateway.mutations --bodies N --seed S`.

Exit status 1 after a wrong response, a lost job or process, or a log with a prompt.
"""

import sys

from tests.campaigns.command_line import Progress, parser_of, run
from tests.gateway.mutations.campaign import run_mutations


def main() -> int:
    parser = parser_of("mutations", __doc__)
    parser.prog = "python -m tests.gateway.mutations"
    parser.add_argument("--bodies", type=int, default=30_000, help="default: 30000")
    options = parser.parse_args()
    return run(lambda: run_mutations(options.bodies, options.seed, Progress().say), options.json)


if __name__ == "__main__":
    sys.exit(main())
