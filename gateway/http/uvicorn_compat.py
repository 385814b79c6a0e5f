"""Names of uvicorn that its manual does not mention.

uvicorn has no option for a deadline of a request's head, none for a limit of connections per
client, and does not tell an application that it will stop. So two of its classes are used:

- `HttpProtocol`, the class behind `http="h11"`. connections.py overrides methods that
`asyncio.Protocol` documents, and the constructor, which uvicorn calls with keyword arguments.

- `Server.shutdown`, which uvicorn awaits before it asks connections to end.
"""

import socket
from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol

__all__ = ["HttpProtocol", "StoppingServer"]


class StoppingServer(uvicorn.Server):
    """Calls `on_stop` when it begins to stop."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)
