"""Posts messages to URLs: one POST to a checked address; redirects are not followed.

A name is resolved once and every address is checked. Connections are made to the checked addresses,
so a second answer of the resolver cannot change the target (DNS rebinding)."""

import asyncio
import base64
import hashlib
import hmac
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from ipaddress import IPv6Address, ip_address

import httpx

from contract.callback_urls import (
    AllowList,
    BadCallbackUrl,
    CallbackUrl,
    parse_callback_url,
    why_blocked,
)
from contract.callbacks import SECRET_PREFIX
from workers.callbacks.retries import (
    Delivered,
    DeliveryFailed,
    DeliveryRefused,
    Outcome,
    parse_retry_after,
)

MAX_ADDRESSES = 3  # per name, in the resolver's order

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Unresolvable(Exception):
    """The host cannot be resolved now."""


class BlockedAddress(Exception):
    """An address of the host is not public. The message names the kind of address only."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Uses the system's resolver, in a thread that cannot be interrupted: a cancelled attempt keeps
    its place until the thread is free. Raises OSError, UnicodeError."""
    lookup = asyncio.ensure_future(
        asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    try:
        await asyncio.wait([lookup])
    except asyncio.CancelledError:
        await asyncio.wait([lookup])
        lookup.exception()  # or the loop reports that nobody has read it
        raise
    return [str(address[0]) for *_, address in lookup.result()]


class AddressGuard:
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


MAX_ANSWER_BYTES = 64 * 1024
_GONE = 410


class WebhookSender:
    """The sender of a process. Reuses no connection: its address was checked for one name only."""

    def __init__(
        self,
        allow: AllowList,
        guard: AddressGuard,
        *,
        timeout_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._allow = allow
        self._guard = guard
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            verify=tls or ssl.create_default_context(),
            trust_env=False,  # no proxy: a proxy would resolve the name itself
            follow_redirects=False,
            timeout=timeout_s,
            limits=httpx.Limits(max_keepalive_connections=0, max_connections=None),
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def send(self, target: str, body: bytes, headers: Mapping[str, str]) -> Outcome:
        """Posts one message. Raises no network error: it becomes the outcome."""
        try:
            url = parse_callback_url(target, self._allow)
            async with asyncio.timeout(self._timeout_s):
                return await self._post(url, body, headers)
        except BadCallbackUrl as exc:
            return DeliveryRefused(f"the URL {exc}")
        except BlockedAddress as exc:
            return DeliveryRefused(
                f"blocked: the host leads to an address that is not public ({exc})"
            )
        except Unresolvable as exc:
            return DeliveryFailed(f"the host's name is not known ({exc})")
        except (TimeoutError, httpx.TimeoutException):
            return DeliveryFailed(f"no answer within {self._timeout_s:g} s")
        except httpx.HTTPError as exc:
            return DeliveryFailed(f"the connection failed ({type(exc).__name__})")

    async def _post(self, url: CallbackUrl, body: bytes, headers: Mapping[str, str]) -> Outcome:
        addresses = await self._guard.addresses(url)
        for address in addresses[:-1]:
            try:
                return await self._post_to(address, url, body, headers)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue  # nothing was sent
        return await self._post_to(addresses[-1], url, body, headers)

    async def _post_to(
        self, address: str, url: CallbackUrl, body: bytes, headers: Mapping[str, str]
    ) -> Outcome:
        """Connects to `address` only; TLS and the Host header use the name."""
        shown = f"[{address}]" if isinstance(ip_address(address), IPv6Address) else address
        request = self._client.build_request(
            "POST",
            httpx.URL(
                scheme=url.scheme, host=shown, port=url.port, raw_path=url.target.encode("ascii")
            ),
            content=body,
            headers={
                "host": url.host_header,
                "content-type": "application/json",
                "user-agent": "batchway",
                "accept-encoding": "identity",
                **headers,
            },
            extensions={"sni_hostname": url.host},
        )
        response = await self._client.send(request, stream=True)
        try:
            await _read_some(response)
        finally:
            await response.aclose()
        return self._judged(response)

    def _judged(self, response: httpx.Response) -> Outcome:
        note = f"HTTP {response.status_code}"
        if response.is_success:
            return Delivered(note)
        if response.status_code == _GONE:
            return DeliveryRefused(f"{note}: the receiver wants no more messages")
        wanted = parse_retry_after(response.headers.get("retry-after"), datetime.now(UTC))
        return DeliveryFailed(note, wanted)


async def _read_some(response: httpx.Response) -> None:
    """Reads at most MAX_ANSWER_BYTES of the answer and discards them."""
    num_bytes = 0
    async for chunk in response.aiter_raw():
        num_bytes += len(chunk)
        if num_bytes > MAX_ANSWER_BYTES:
            return


def signed_headers(
    message_id: str, timestamp_s: int, body: bytes, secrets: Sequence[str]
) -> dict[str, str]:
    """The headers of a message as specified by Standard Webhooks (standardwebhooks.com).

    `timestamp_s`: Unix seconds of the attempt.
    """
    headers = {"webhook-id": message_id, "webhook-timestamp": str(timestamp_s)}
    if secrets:
        signed = f"{message_id}.{timestamp_s}.".encode() + body
        headers["webhook-signature"] = " ".join(f"v1,{_sign(s, signed)}" for s in secrets)
    return headers


def _sign(secret: str, signed: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    return base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
