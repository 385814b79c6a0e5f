"""Reads the URL of a callback strictly: what two parsers could read differently is refused.

It is read once, here; whoever connects uses the parts, never the text.
"""

import re
from ipaddress import IPv4Address, IPv6Address

import msgspec

from contract.addresses import Address, AllowList, is_host_name, why_blocked

MAX_URL_CHARS = 2048
_URL = re.compile(
    r"(?P<scheme>https?)://"
    r"(?P<host>\[[0-9a-f:.]+\]|[0-9a-z._-]+)"
    r"(?::(?P<port>[1-9][0-9]{0,4}))?"
    r"(?P<target>(?:/(?:[0-9a-z\-._~!$&'()*+,;=:@/]|%[0-9a-f]{2})*)?"
    r"(?:\?(?:[0-9a-z\-._~!$&'()*+,;=:@/?]|%[0-9a-f]{2})*)?)",
    re.IGNORECASE | re.ASCII,  # else U+017F is an s and U+212A a k
)


class BadCallbackUrl(ValueError):
    """A URL that callbacks are not sent to. The message is one clause and quotes nothing."""


class CallbackUrl(msgspec.Struct, frozen=True):
    """The parts of a URL. `host` is lower case, without brackets; `address` where it is one."""

    scheme: str
    host: str
    port: int
    target: str  # path and query
    address: Address | None

    @property
    def host_header(self) -> str:
        name = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return name if self.port == _DEFAULT_PORTS[self.scheme] else f"{name}:{self.port}"


_DEFAULT_PORTS = {"https": 443, "http": 80}


def parse_callback_url(text: str, allow: AllowList) -> CallbackUrl:
    """Raises BadCallbackUrl."""
    if len(text) > MAX_URL_CHARS:
        raise BadCallbackUrl(f"may have at most {MAX_URL_CHARS} characters")
    match = _URL.fullmatch(text)
    if match is None:
        raise BadCallbackUrl(
            "must be https://host/path in ASCII (names in Punycode), without user, password "
            "or fragment"
        )
    scheme, host = match["scheme"].lower(), match["host"].lower()
    port = int(match["port"] or _DEFAULT_PORTS[scheme])
    if port > 65_535:
        raise BadCallbackUrl("has a port over 65535")
    address = _address_of(host)
    host = host.strip("[]")
    is_open = allow.covers_host(host)
    if scheme != "https" and not is_open:
        raise BadCallbackUrl("must be https")
    if address is not None and not is_open and (why := why_blocked(address)):
        raise BadCallbackUrl(f"leads to an address that is not public ({why})")
    if address is None and not is_open:
        _check_name(host)
    target = match["target"]
    return CallbackUrl(
        scheme, host, port, target if target.startswith("/") else f"/{target}", address
    )


def _address_of(host: str) -> Address | None:
    """The address that a host is; None for a name. Raises BadCallbackUrl for what is neither."""
    try:
        if host.startswith("["):
            return IPv6Address(host[1:-1])
        if is_host_name(host):
            return None
        return IPv4Address(host)
    except ValueError:
        pass
    raise BadCallbackUrl("has a host that is neither a name nor an address in its usual notation")


def _check_name(host: str) -> None:
    """Names that lead home whatever a name server says."""
    if "." not in host:
        raise BadCallbackUrl("has a host without a domain")
    if host.endswith((".localhost", ".local", ".internal", ".localdomain", ".home.arpa")):
        raise BadCallbackUrl("has a host of a private domain")
