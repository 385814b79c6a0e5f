"""Gateway processes behind one port.

Several bind it each for itself, and Linux spreads connections over those that live
(docs/decisions/http-server.md). Each listens on a port of its own, too, for Prometheus: a sum of
their counters would fall when one restarts.
"""

import asyncio
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Self

from infra.child import Child, Console, keep_running, kill_all, parts


class Gateways:
    """`listeners`: bound; the first is that of all, which listens if there is one gateway; others
    listen, of one each. `arguments`: of `batchway gateway`. `budget_s`: until they are killed."""

    def __init__(
        self, listeners: Sequence[socket.socket], arguments: Sequence[str], budget_s: float
    ) -> None:
        self.listeners = listeners
        self.children: list[Child] = []
        self._arguments = arguments
        self._budget_s = budget_s

    def made(self, environ: Mapping[str, str], console: Console, lifeline_fd: int) -> Self:
        """The same with their processes, none of them started."""
        shared, *own = (listener.fileno() for listener in self.listeners)
        for number, fds in enumerate([(shared, fd) for fd in own] or [(shared,)], 1):
            name = f"gateway-{number}" if own else "gateway"
            words = ["gateway", *self._arguments, "--listen-fd", *map(str, fds)]
            line = [sys.executable, "-m", "infra", *words]
            self.children.append(Child(name, line, environ, console, pass_fds=(lifeline_fd, *fds)))
        self._console = console
        return self

    async def serve(self) -> None:
        """Keeps them running until cancelled. Raises PartEnded."""
        async with parts() as group:
            for child in self.children:
                group.create_task(keep_running(child, self._console))

    async def end(self) -> None:
        """Ends them after their requests."""
        self._close()
        await asyncio.gather(*(child.stop(self._budget_s) for child in self.children))

    async def kill(self) -> None:
        """Ends them at once."""
        self._close()
        await kill_all(self.children)

    def _close(self) -> None:
        for listener in self.listeners:
            listener.close()
