"""Keeps callbacks out of private networks.

A name is resolved once and every address is checked. Connections are made to the checked addresses,
so a second answer of the resolver cannot change the target (DNS rebinding).
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address

from contract.callback_urls import AllowList, CallbackUrl, why_blocked

MAX_ADDRESSES = 3  # per name, in the resolver's order

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Unresolvable(Exception):
    """The host cannot be resolved now."""


class BlockedAddress(Exception):
    """An address of the host is not public. The message names the kind of address only."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Uses the system's resolver. Raises OSError, UnicodeError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Guard:
    """Resolves a URL to the addresses that may be used."""

    def __init__(self, allow: AllowList, resolve: Resolve = resolve) -> None:
        self._allow = allow
        self._resolve = resolve

    async def addresses(self, url: CallbackUrl) -> list[str]:
        """At most MAX_ADDRESSES. Raises Unresolvable, and BlockedAddress if one is not public."""
        if url.address is not None:
            answers: Sequence[str] = [str(url.address)]
        else:
            try:
                answers = await self._resolve(url.host, url.port)
            except (OSError, UnicodeError) as exc:
                raise Unresolvable(type(exc).__name__) from exc
        is_open_name = url.host in self._allow.names
        addresses = []
        for answer in dict.fromkeys(answers):
            try:
                address = ip_address(answer)
            except ValueError as exc:
                raise BlockedAddress("not an address") from exc
            is_open = is_open_name or self._allow.covers_address(address)
            if not is_open and (why := why_blocked(address)):
                raise BlockedAddress(why)
            addresses.append(answer)
        if not addresses:
            raise Unresolvable("no address")
        return addresses[:MAX_ADDRESSES]
