"""A process that submits jobs of one tenant and prints how many were admitted:

python -m tests.contract.submitter URL NAMESPACE PARTITION TASKS TRIES CONCURRENT_TOKENS
"""

import asyncio
import contextlib
import sys

from contract.connection import connect
from contract.errors import JobRefused
from contract.function_types import Submission, TenantLimits
from contract.functions import Functions
from contract.jobs import Endpoint, Job, SamplingParams
from contract.keys import Keys, new_job_id

PROMPT = (1, 2, 3)
MAX_TOKENS = 7
COST = len(PROMPT) + MAX_TOKENS


async def hammer(
    redis_url: str, keys: Keys, num_tasks: int, num_tries: int, limits: TenantLimits
) -> int:
    """Submits from as many gateways as tasks, each with its own connection. Returns the number of
    admitted jobs."""
    return sum(
        await asyncio.gather(
            *(_submit_all(redis_url, keys, num_tries, limits) for _ in range(num_tasks))
        )
    )


async def _submit_all(redis_url: str, keys: Keys, num_tries: int, limits: TenantLimits) -> int:
    client = connect(redis_url, keys, command_timeout_s=None)
    functions, num_accepted = Functions(client, keys), 0
    try:
        for _ in range(num_tries):
            with contextlib.suppress(JobRefused):
                await functions.submit(
                    _job(keys.partition), Submission(MAX_TOKENS, 600, 600, limits=limits)
                )
                num_accepted += 1
    finally:
        await client.aclose()
    return num_accepted


def _job(partition: int) -> Job:
    return Job(
        id=new_job_id(partition),
        tenant="greedy",
        model="m",
        lane="standard",
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=PROMPT,
        params=SamplingParams(max_tokens=MAX_TOKENS, seed=0),
        created_s=0,
    )


if __name__ == "__main__":
    url, namespace, *numbers = sys.argv[1:]
    partition, tasks, tries, tokens = map(int, numbers)
    limit = TenantLimits(concurrent_tokens=tokens)
    print(asyncio.run(hammer(url, Keys(namespace, partition), tasks, tries, limit)))
