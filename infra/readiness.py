"""Waits until a gateway is ready."""

import asyncio
import time
from collections.abc import Callable, Sequence

_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 5.0
_REMIND_EVERY_S = 30.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104


def reachable_host(host: str) -> str:
    """An address at which a server bound to `host` is reachable on this machine."""
    return _WILDCARDS.get(host, host)


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def until_ready(
    host: str, port: int, allowed_hosts: Sequence[str], remind: Callable[[], None]
) -> None:
    """Returns once /readyz answers 200; calls `remind` every half minute. `allowed_hosts`: the host
    names that the gateway accepts, if restricted."""
    address = reachable_host(host)
    is_allowed = not allowed_hosts or {"*", address} & set(allowed_hosts)
    name = in_url(address if is_allowed else allowed_hosts[0])
    remind_at = time.monotonic() + _REMIND_EVERY_S
    while await _readyz_status(address, port, name) != 200:
        if time.monotonic() >= remind_at:
            remind()
            remind_at += _REMIND_EVERY_S
        await asyncio.sleep(_POLL_S)


async def _readyz_status(address: str, port: int, name: str) -> int | None:
    """The status of one GET; None without an answer."""
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                request = f"GET /readyz HTTP/1.1\r\nHost: {name}:{port}\r\n"
                writer.write(f"{request}Connection: close\r\n\r\n".encode())
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    words = status_line.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None
