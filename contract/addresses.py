"""Decides which addresses callbacks may be sent to: public ones only.

Does not resolve names. An IPv6 address may embed an IPv4 address that a router or the kernel
extracts, so embedded addresses are checked too.
"""

from collections.abc import Iterable, Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

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
_NAT64 = IPv6Network("64:ff9b::/96")
_LOW_32_BITS = (
    IPv6Network("::/96"),  # IPv4-compatible
    IPv6Network("::ffff:0:0/96"),  # IPv4-mapped
    IPv6Network("::ffff:0:0:0/96"),  # IPv4-translated
    _NAT64,
)
_SIX_TO_FOUR = IPv6Network("2002::/16")
_TEREDO = IPv6Network("2001::/32")
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
    number = int(address)
    low = IPv4Address(number & 0xFFFF_FFFF)
    if any(address in net for net in _LOW_32_BITS):
        return [low]
    if address in _SIX_TO_FOUR:
        return [IPv4Address((number >> 80) & 0xFFFF_FFFF)]
    if address in _TEREDO:
        server = IPv4Address((number >> 64) & 0xFFFF_FFFF)
        return [server, IPv4Address(~number & 0xFFFF_FFFF)]
    if address in _GLOBAL_UNICAST and (number >> 32) & 0xFFFF_FFFF in _ISATAP:
        return [low]
    return []


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
