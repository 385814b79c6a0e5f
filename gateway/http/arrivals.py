"""How often one address may connect. Its number of connections at a time: turns.ConcurrencyCap."""

import ipaddress
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from cachetools import TTLCache

# An address has credit for this many connections at once, and for so many more each second. Without
# credit connections are answered 429, and beyond so many of those each second they are reset.
CREDIT, PER_S, ANSWERED = 1_024.0, 64.0, 64.0
WHOLE = 7 / 8  # comes back with a whole head, so of those there may be eight times as many
FAILED = 15.0  # taken beside the one if the connection ends within its first head
MAX_NETWORKS = 16_384  # that are remembered; each until its credit would be full
_IPV6_PREFIX_BITS = 64  # providers give each customer a network of this size


class Arrivals:
    """The credit of each network for connections. `cap`: how many it may have; 0: no limit."""

    def __init__(self, cap: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = max(cap, CREDIT) if cap else 0.0
        self._clock = clock
        full_s = (self._most + ANSWERED) / PER_S
        self._left: TTLCache[str, tuple[float, float]] = TTLCache(MAX_NETWORKS, full_s, clock)

    def admits(self, address: Any) -> bool:
        """Counts a new connection. False if it gets no answer."""
        return not isinstance(address, tuple) or self.take(network_of(address[0]), 1) > -ANSWERED

    def take(self, network: str, amount: float = 0.0) -> float:
        """The credit that is left then. A negative amount is given back."""
        if not self._most:
            return 0.0
        now = self._clock()
        left, then = self._left.get(network, (self._most, now))
        left = min(self._most, left + (now - then) * PER_S) - amount
        self._left[network] = max(-ANSWERED, min(self._most, left)), now
        return self._left[network][0]


@lru_cache(maxsize=4_096)
def network_of(address: str) -> str:
    """The name under which an address is counted: itself, or its network in IPv6."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, _IPV6_PREFIX_BITS), strict=False))
    return str(ip)
