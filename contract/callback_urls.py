"""Parses the URL of a callback; refuses what two parsers could read differently.

urllib.parse reads the URL once. Connections use the parsed parts, never the text.
"""

import re
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import urlsplit

import msgspec

from contract.addresses import Address, AllowList, is_host_name, why_blocked

MAX_URL_CHARS = 2048
# A path and a query, RFC 3986, sections 3.3 and 3.4; all of it ASCII.
_TARGET = re.compile(r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?]|%[0-9A-Fa-f]{2})*")
_FORM = "must be https://host/path in ASCII (names in Punycode), without user, password or fragment"


class BadCallbackUrl(ValueError):
    """A URL that callbacks may not use. The message is one clause and does not quote the URL."""


class CallbackUrl(msgspec.Struct, frozen=True):
    """The parts of a URL. `host` is lower case without brackets; `address` is set if it is one."""

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
    """Parses a URL. Raises BadCallbackUrl."""
    if len(text) > MAX_URL_CHARS:
        raise BadCallbackUrl(f"may have at most {MAX_URL_CHARS} characters")
    # urlsplit silently removes some forbidden characters.
    if not text.isascii() or not text.isprintable() or set(text) & set(" #\\"):
        raise BadCallbackUrl(_FORM)
    try:
        parts = urlsplit(text)
        host, given_port = parts.hostname or "", parts.port
    except ValueError:
        raise BadCallbackUrl(_FORM) from None
    if given_port == 0:
        raise BadCallbackUrl(_FORM)
    scheme, target = parts.scheme, text.partition("//")[2][len(parts.netloc) :]
    if scheme not in _DEFAULT_PORTS or not _TARGET.fullmatch(target):
        raise BadCallbackUrl(_FORM)
    shown = f"[{host}]" if ":" in host else host
    if parts.netloc.lower() != (shown if given_port is None else f"{shown}:{given_port}"):
        raise BadCallbackUrl(_FORM)  # a user, an empty port or one with a leading zero
    port = _DEFAULT_PORTS[scheme] if given_port is None else given_port
    address = _address_of(host)
    is_open = allow.covers_host(host)
    if scheme != "https" and not is_open:
        raise BadCallbackUrl("must be https")
    if address is not None and not is_open and (why := why_blocked(address)):
        raise BadCallbackUrl(f"leads to an address that is not public ({why})")
    if address is None and not is_open:
        _check_name(host)
    return CallbackUrl(
        scheme, host, port, target if target.startswith("/") else f"/{target}", address
    )


def _address_of(host: str) -> Address | None:
    """The host as an address; None for a name. Raises BadCallbackUrl where it is neither."""
    try:
        if ":" in host and "%" not in host:  # no zone: zones are local to one machine
            return IPv6Address(host)
        if is_host_name(host):
            return None
        return IPv4Address(host)
    except ValueError:
        pass
    raise BadCallbackUrl("has a host that is neither a name nor an address in its usual notation")


def _check_name(host: str) -> None:
    """Refuses names of local domains, whatever they resolve to. Raises BadCallbackUrl."""
    if "." not in host:
        raise BadCallbackUrl("has a host without a domain")
    if host.endswith((".localhost", ".local", ".internal", ".localdomain", ".home.arpa")):
        raise BadCallbackUrl("has a host of a private domain")
