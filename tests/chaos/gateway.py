"""`batchway gateway` with the mistake that was planted in it: `python -m tests.chaos.gateway`."""

import sys

from infra.cli import main
from tests.chaos.mistakes import plant_in_gateway

if __name__ == "__main__":
    plant_in_gateway()
    sys.exit(main(["gateway", *sys.argv[1:]]))
