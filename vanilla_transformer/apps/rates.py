"""How often a client may ask."""

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

_MINUTE = 60.0


class RateLimiter:
    """So many requests a minute for each client: all of them at once, or spread out.

    It keeps a number for each client (the generic cell rate algorithm), for `max_clients` of them at most: those that
    were longest unheard of are forgotten first. Not for several threads.
    """

    def __init__(
        self, per_minute: int, *, max_clients: int = 2**16, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.per_minute = per_minute
        self.max_clients = max_clients
        self.clock = clock
        self._used_until: OrderedDict[str, float] = OrderedDict()  # longest unheard of first

    def __len__(self) -> int:
        return len(self._used_until)

    def admit(self, client: str) -> float:
        """Counts a request: 0, or the seconds after which one will be admitted, if this one is not."""
        now = self.clock()
        while self._used_until and next(iter(self._used_until.values())) <= now:
            self._used_until.popitem(last=False)
        until = max(self._used_until.get(client, now), now) + _MINUTE / self.per_minute
        wait = until - now - _MINUTE
        if wait > 1e-6:  # what rounding leaves
            return wait
        self._used_until[client] = until
        self._used_until.move_to_end(client)
        if len(self._used_until) > self.max_clients:
            self._used_until.popitem(last=False)
        return 0.0


def find_network(address: str) -> str:
    """What stands for a client without a key: its address, or of IPv6 the network, whose addresses are its own."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
    return address
