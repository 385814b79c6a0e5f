"""Which URLs and addresses callbacks may be sent to: https, and public addresses only.

urllib.parse reads a URL once; what two parsers could read differently is refused, and connections
use the parsed parts, never the text. Names are not resolved here. An IPv6 address may embed an IPv4
address that a router or the kernel extracts, so embedded addresses are checked too.
"""

import re
from collections.abc import Iterable, Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from urllib.parse import urlsplit

import msgspec

Address = IPv4Address | IPv6Address

_BLOCKED_V4 = {
    IPv4Network(net): why
    for net, why in {
        "0.0.0.0/8": "unspecified",
        "10.0.0.0/8": "private",
        "100.64.0.0/10": "carrier-grade NAT",
        "127.0.0.0/8": "loopback",
        "168.63.129.16/32": "cloud metadata",  # Azure's, outside all special ranges
        "169.254.0.0/16": "link-local",  # where clouds serve credentials
        "172.16.0.0/12": "private",
        "192.0.0.0/24": "protocol assignments",  # Oracle's cloud metadata among them
        "192.0.2.0/24": "documentation",
        "192.88.99.0/24": "6to4 relay",
        "192.168.0.0/16": "private",
        "198.18.0.0/15": "benchmarking",
        "198.51.100.0/24": "documentation",
        "203.0.113.0/24": "documentation",
        "224.0.0.0/4": "multicast",
        "240.0.0.0/4": "reserved",
    }.items()
}
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_BLOCKED_V6 = {
    IPv6Network(net): why
    for net, why in {
        "2001::/23": "protocol assignments",  # Teredo's embedded addresses are checked before
        "2001:db8::/32": "documentation",
        "3fff::/20": "documentation",
    }.items()
}
_LOW_32_BITS = (
    IPv6Network("::/96"),  # IPv4-compatible
    IPv6Network("::ffff:0:0/96"),  # IPv4-mapped
    IPv6Network("::ffff:0:0:0/96"),  # IPv4-translated
    IPv6Network("64:ff9b::/96"),  # NAT64
)
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)  # the upper half of an interface id


def why_blocked(address: Address) -> str | None:
    """The reason why an address is blocked, in one or two words; None where it is allowed."""
    if isinstance(address, IPv4Address):
        return next((why for net, why in _BLOCKED_V4.items() if address in net), None)
    if address.is_loopback:
        return "loopback"
    carried = _carried(address)
    if carried:
        return next((why for why in map(why_blocked, carried) if why is not None), None)
    if address not in _GLOBAL_UNICAST:
        return "not global"
    return next((why for net, why in _BLOCKED_V6.items() if address in net), None)


def _carried(address: IPv6Address) -> Sequence[IPv4Address]:
    """The embedded IPv4 addresses, to which packets may be forwarded."""
    low = IPv4Address(int(address) & 0xFFFF_FFFF)
    if any(address in net for net in _LOW_32_BITS):
        return [low]
    if address.sixtofour is not None:
        return [address.sixtofour]
    if address.teredo is not None:
        return address.teredo
    is_isatap = (int(address) >> 32) & 0xFFFF_FFFF in _ISATAP
    return [low] if is_isatap and address in _GLOBAL_UNICAST else []


class AllowList(msgspec.Struct, frozen=True):
    """Targets that are allowed although they are not public: networks, addresses, host names."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    names: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> "AllowList":
        """Reads the entries. Raises ValueError, which quotes the entry."""
        networks: list[IPv4Network | IPv6Network] = []
        names: set[str] = set()
        for entry in entries:
            try:
                networks.append(ip_network(entry))
            except ValueError:
                if not is_host_name(entry):
                    message = f"{entry!r} is no address, network (CIDR) or host name"
                    raise ValueError(message) from None
                names.add(entry.lower())
        return cls(tuple(networks), frozenset(names))

    def __bool__(self) -> bool:
        return bool(self.networks or self.names)

    def covers_address(self, address: Address) -> bool:
        return any(address in network for network in self.networks)

    def covers_host(self, host: str) -> bool:
        """Whether a URL's host is on the list, without a DNS query."""
        if host in self.names:
            return True
        if host == "localhost":
            return any(net.is_loopback for net in self.networks)
        try:
            return self.covers_address(ip_address(host))
        except ValueError:
            return False


def is_host_name(text: str) -> bool:
    """Whether a text is a DNS name and no address in any notation."""
    labels = text.lower().split(".")
    return (
        text.isascii()  # checked on the original text: lower() turns the Kelvin sign into k
        and len(text) <= 253
        and all(_is_label(label) for label in labels)
        and not labels[-1][0].isdigit()  # `1`, `0x7f.1`: what C libraries read as addresses
    )


def _is_label(label: str) -> bool:
    body = label.replace("-", "").replace("_", "")
    is_plain = body.isascii() and body.isalnum()
    return 0 < len(label) <= 63 and is_plain and label[0] != "-" and label[-1] != "-"


# --- URLs

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
