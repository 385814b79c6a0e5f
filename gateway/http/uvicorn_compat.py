"""Names of uvicorn that its manual does not mention.

uvicorn has no option for a deadline of a request's head, none for a limit of connections per
client, and does not tell an application that it will stop. So two of its classes are used:

- `H11Protocol`, the class behind `http="h11"`. connections.py overrides methods that
`asyncio.Protocol` documents, and the constructor, which uvicorn calls with keyword arguments. Its
attribute `conn`, the connection of h11, tells whether a request may begin, because h11 refuses the
empty lines that old clients send before one, and whether its body is still arriving.

- `Server.shutdown`, which uvicorn awaits before it asks connections to end, and `Server.startup`,
which gets the listening sockets; `shutdown` closes those that were given to `serve`.
"""

import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.http.listener import AdmittingListener


class HttpProtocol(H11Protocol):
    """uvicorn's protocol, which also tells where in a request the next byte belongs."""

    @property
    def awaits_request(self) -> bool:
        """Whether the next byte is the first of a request."""
        return self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    @property
    def awaits_body(self) -> bool:
        """Whether the next byte belongs to a request's body."""
        return self.conn.their_state is h11.SEND_BODY


class StoppingServer(uvicorn.Server):
    """Calls `on_stop` when it begins to stop, and `admits` with the address of each client."""

    def __init__(
        self, config: uvicorn.Config, on_stop: Callable[[], None], admits: Callable[[Any], bool]
    ) -> None:
        super().__init__(config)
        self._on_stop, self._admits = on_stop, admits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if sockets is not None:
            sockets = [AdmittingListener(each, self._admits) for each in sockets]
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)
