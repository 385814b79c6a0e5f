"""The system under overload: two gateways, one worker with a fixed step time, one Redis.

Limits, quotas and shares are those of an operator who expects overload.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.api_keys import ApiKeys, KeyTerms
from tests.endurance.pool import Pool, gateway_process, pool, until_it_answers
from tests.fakes import HashModelOptions
from tests.overload.arrivals import TENANTS

NUM_GATEWAYS = 2
NUM_SLOTS = 45  # sequences that run at once
STEP_S = 0.27
TTFT_TARGET_S = 1.0  # of the interactive lane
BATCH_SHARE = 0.1  # of all tokens, guaranteed
BATCHING = f"""
max_num_seqs: {NUM_SLOTS}
lanes:
  interactive:
    priority: 0
  standard:
    priority: 1
    minimum_share: 0.2
  batch:
    priority: 2
    minimum_share: {BATCH_SHARE}
"""
LANE_SHARE = 0.5  # of a lane's limit of waiting tokens, for one tenant
_GATEWAY = {
    "BATCHWAY_LANE_BOUNDS": "interactive=0.05s,standard=3s,standard=2000,batch=2000",
    "BATCHWAY_SYNC_DEADLINE_S": "60",
    "BATCHWAY_MAX_CONNECTIONS_PER_ADDRESS": "0",  # all callers have one address
}
_HASH_MODEL = HashModelOptions(num_blocks=256, step_s=STEP_S)
_LEASE_S = 10.0  # long, because the machine is busy


@dataclass(frozen=True, slots=True)
class System:
    """`urls` are the gateways'; `api_keys` one for each tenant."""

    pool: Pool
    urls: list[str]
    api_keys: Mapping[str, str]


@contextlib.asynccontextmanager
async def running_system() -> AsyncIterator[System]:
    """Starts all parts and waits until they are ready; ends them at exit."""
    with tempfile.TemporaryDirectory(prefix="bw-overload-") as directory:
        batching = Path(directory) / "batching.yaml"
        batching.write_text(BATCHING)
        settings: dict[str, Any] = {"batching_path": str(batching), "lease_s": _LEASE_S}
        async with pool(_HASH_MODEL, num_workers=1, has_gateway=False, **settings) as found:
            caller = found.caller
            api_keys = ApiKeys(caller.client, caller.keys)
            made = {}
            for tenant in TENANTS:
                terms = KeyTerms(tenant=tenant, lane_share=LANE_SHARE)
                made[tenant], _ = await api_keys.create(terms)
            with contextlib.ExitStack() as gateways:
                urls = [
                    gateways.enter_context(gateway_process(found.server.url, caller.keys, _GATEWAY))
                    for _ in range(NUM_GATEWAYS)
                ]
                await asyncio.gather(*map(until_it_answers, urls))
                yield System(found, urls, made)
