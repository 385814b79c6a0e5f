"""Waits until a gateway and the workers behind it are ready."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 5.0
_REMIND_EVERY_S = 30.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104


class _Ready(msgspec.Struct):
    workers: dict[str, int]


def reachable_host(host: str) -> str:
    """An address at which a server bound to `host` is reachable on this machine."""
    return _WILDCARDS.get(host, host)


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def until_ready(
    host: str,
    port: int,
    allowed_hosts: Sequence[str],
    models: Sequence[str],
    failed: Collection[str],
    tell: Callable[[str], None],
) -> list[str]:
    """Waits until /readyz shows a live worker of some model and the other models have one or have
    failed. Returns the models with one. Tells of each if there are several, and every half minute
    what is missing. `allowed_hosts`: the host names that the gateway accepts, if restricted."""
    address = reachable_host(host)
    is_allowed = not allowed_hosts or {"*", address} & set(allowed_hosts)
    name = in_url(address if is_allowed else allowed_hosts[0])
    remind_at = time.monotonic() + _REMIND_EVERY_S
    missing = list(models)
    while True:
        live = await _live_workers(address, port, name)
        for model in [model for model in missing if live.get(model)]:
            missing.remove(model)
            if len(models) > 1:
                tell(f"model {model!r} is ready ({len(models) - len(missing)} of {len(models)})")
        ready = [model for model in models if model not in missing]
        if ready and all(model in failed for model in missing):
            return ready
        if time.monotonic() >= remind_at:
            tell(f"still waiting for a worker of {', '.join(map(repr, missing))} to be ready")
            remind_at += _REMIND_EVERY_S
        await asyncio.sleep(_POLL_S)


async def _live_workers(address: str, port: int, name: str) -> dict[str, int]:
    """The number of live workers by model; empty without an answer or while none is ready."""
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                request = f"GET /readyz HTTP/1.1\r\nHost: {name}:{port}\r\n"
                writer.write(f"{request}Connection: close\r\n\r\n".encode())
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return {}
    words = head.split(maxsplit=2)
    if len(words) < 2 or words[1] != b"200":
        return {}
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(body, type=_Ready).workers
    return {}
