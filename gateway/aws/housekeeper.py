"""A scheduled Lambda function: loads the function library into Redis and ends overdue jobs.

It runs after each deployment, too. No other role may load functions.
"""

import asyncio
from typing import Any

from contract.connection import connect
from contract.functions import Functions
from contract.keys import Keys
from contract.library import ensure_library
from gateway.aws.environment import load_settings
from gateway.settings import GatewaySettings


def handler(_event: Any, _context: Any) -> dict[str, int]:
    """The entry point of HousekeeperFunction; returns what the sweep found."""
    return asyncio.run(sweep(load_settings()))


async def sweep(settings: GatewaySettings) -> dict[str, int]:
    """Raises BrokerUnavailable."""
    keys = Keys(settings.namespace)
    async with connect(settings.redis_url, keys) as client:
        await ensure_library(client)
        swept = await Functions(client, keys).sweep()
    return {
        "leases_lapsed": swept.num_lapsed,
        "jobs_expired": swept.num_expired,
        "jobs_unattended": swept.num_unattended,
    }
