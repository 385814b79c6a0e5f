"""Overload by a factor of ten: `python -m tests.overload --factor F --seconds S`.

Exit status 1 after a fault or a missed goal; see docs/reliability.md.
"""

import sys

from tests.campaigns.command_line import Progress, parser_of, run
from tests.overload.campaign import OverloadOptions, run_overload


def main() -> int:
    parser = parser_of("overload", __doc__)
    parser.add_argument(
        "--factor", type=float, default=10.0, help="times the capacity that arrives (default: 10)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of overload, and beside it (default: 60)"
    )
    given = parser.parse_args()
    options = OverloadOptions(
        factor=given.factor, seconds=given.seconds, after_s=given.seconds, seed=given.seed
    )
    return run(lambda: run_overload(options, Progress().say), given.json)


if __name__ == "__main__":
    sys.exit(main())
