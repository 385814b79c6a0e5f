"""A process that submits jobs of one tenant and prints how many were admitted:

python -m tests.contract.submitter URL NAMESPACE PARTITION TASKS TRIES CONCURRENT_TOKENS
"""

import asyncio
import contextlib
import sys

from contract.connection import connect
from contract.errors import JobRefused
from contract.function_types import TenantLimits
from contract.functions import Functions
from contract.keys import Keys
from tests.contract.some_calls import make_job, make_submission

COST = 13  # tokens of each job


async def submit_from_many(
    redis_url: str, keys: Keys, num_tasks: int, num_tries: int, limits: TenantLimits
) -> int:
    """Submits from as many gateways as tasks, each with its own connection. Returns the number of
    admitted jobs."""

    async def submit_all() -> int:
        num_accepted = 0
        async with connect(redis_url, keys, command_timeout_s=None) as client:
            for _ in range(num_tries):
                with contextlib.suppress(JobRefused):
                    await Functions(client, keys).submit(make_job(), make_submission(limits=limits))
                    num_accepted += 1
        return num_accepted

    return sum(await asyncio.gather(*(submit_all() for _ in range(num_tasks))))


if __name__ == "__main__":
    url, namespace, *numbers = sys.argv[1:]
    partition, tasks, tries, tokens = map(int, numbers)
    limit = TenantLimits(concurrent_tokens=tokens)
    print(asyncio.run(submit_from_many(url, Keys(namespace, partition), tasks, tries, limit)))
