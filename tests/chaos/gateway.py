"""`batchway gateway` with a planted mistake: `python -m tests.chaos.gateway`."""

import sys

from infra.cli import main
from tests.chaos.mistakes import plant_in_gateway

if __name__ == "__main__":
    plant_in_gateway()
    sys.exit(main(["gateway", *sys.argv[1:]]))
