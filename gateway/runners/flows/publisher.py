"""Appends the events of several flows' jobs; those that wait together take one call."""

import asyncio

from contract.errors import BatchwayError
from contract.function_types import Append, Verdict
from contract.functions import Functions
from contract.jobs import JobStatus

_Waiting = tuple[Append, "asyncio.Future[Verdict | JobStatus]"]


class Publisher:
    """Appends for one incarnation until `run` is cancelled. Each call takes all that waits."""

    def __init__(self, functions: Functions, incarnation: str, lease_s: float) -> None:
        self._functions = functions
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._waiting: list[_Waiting] = []
        self._wake = asyncio.Event()

    async def append(self, item: Append) -> Verdict | JobStatus:
        """Appends to a job's log. Returns once Redis has decided. Raises BatchwayError."""
        future: asyncio.Future[Verdict | JobStatus] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._wake.set()
        return await future

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            items = [item for item, _ in waiting]
            try:
                verdicts = await self._functions.append(
                    self._incarnation, items, lease_s=self._lease_s
                )
            except BatchwayError as exc:
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(exc)
            else:
                for (_, future), (verdict, _) in zip(waiting, verdicts, strict=True):
                    if not future.done():
                        future.set_result(verdict)
