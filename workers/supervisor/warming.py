"""Computes what next prompts likely begin with, while the worker has no job: asks the engine for
one output token, so that its prefix cache has the prompt. Nothing of it is logged or counted with
jobs."""

import contextlib
import secrets
from dataclasses import dataclass

from cachetools import LRUCache

from contract.codec import WarmPrompt
from contract.errors import BrokerUnavailable, CommandDenied, WireError
from contract.jobs import Job, SamplingParams
from workers.ipc.messages import EngineLoad, Request, StopJob, TokenOut
from workers.lanes import WARM
from workers.supervisor.holding import Holding
from workers.supervisor.worker_broker import WorkerBroker

_PREFIX = "warm-"  # of the ids by which the engine knows them
_PARAMS = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


@dataclass(eq=False)
class Warming:
    """The prompts that one worker computes so, one at a time. `job_id`: of the current one."""

    _broker: WorkerBroker
    _holding: Holding

    def __post_init__(self) -> None:
        self.job_id = ""
        self._prompt: WarmPrompt
        # Tenant, length and hash of computed prompts -> tokens of them that were computed here.
        self._remembered: LRUCache[tuple[str, int, int], int] = LRUCache(32)
        self._worth: list[str | int] = []  # as Functions.warm_take has it

    async def begin(self) -> None:
        """Takes a prompt, if one is offered and the worker is idle."""
        holding = self._holding
        if holding.engine.ready is None:  # the engine has died, with its cache
            self.job_id = ""
            self._remembered.clear()
        elif holding.has_warm_offer and not self.job_id and not holding.jobs:
            found, worth, self._worth = None, self._worth, []
            with contextlib.suppress(BrokerUnavailable, CommandDenied, WireError):
                found = await self._broker.warm_take(worth)
            holding.has_warm_offer = found is not None
            if found is not None and not holding.jobs:
                end_s, self._prompt = found
                (tenant, _, ids), self.job_id = self._prompt, _PREFIX + secrets.token_hex(8)
                of_job = self.job_id, 0, tenant, WARM.name, (ids,), _PARAMS, ((),), (False,)
                holding.engine.send([Request(*of_job, deadline_s=end_s)])

    def end(self, message: object = None) -> None:
        """The engine has computed the current prompt, if the message is a token."""
        (tenant, num_before, token_ids), self.job_id = self._prompt, ""
        if isinstance(message, TokenOut):
            num_tokens = len(token_ids) - num_before
            self._remembered[tenant, len(token_ids), hash(token_ids)] = num_tokens
            self._worth += [tenant, num_tokens, 0]
        self._holding.wake.set()  # for the next one

    def give_way(self, job: Job) -> None:
        """A job comes: what is computed stays in the cache. Counts what it need not compute."""
        if self.job_id:
            self._holding.engine.send([StopJob(self.job_id, 0)])
            self.end()
        for tenant, num_tokens, hashed in list(self._remembered):
            if tenant == job.tenant and hash(job.prompt_ids[:num_tokens]) == hashed:
                num_used = self._remembered.pop((tenant, num_tokens, hashed))
                self._worth += [tenant, 0, num_used]

    def hide_step(self, load: EngineLoad) -> None:
        """Takes the counts out of a step that computed no job's tokens."""
        running = self._holding.engine.running
        if running and all(job_id.startswith(_PREFIX) for job_id in running):
            load.num_step_tokens = load.num_running = 0
