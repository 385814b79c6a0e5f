"""`batchway gateway` with a planted mistake: `python -m tests.chaos.gateway`."""

import sys

from gateway.runners.batches import lease
from gateway.runners.flows import worker
from infra.cli import main
from tests.chaos.mistakes import plant_in_gateway
from tests.chaos.parts import LEASE_S

if __name__ == "__main__":
    plant_in_gateway()
    worker.LEASE_S = lease.LEASE_S = LEASE_S
    sys.exit(main(["gateway", *sys.argv[1:]]))
