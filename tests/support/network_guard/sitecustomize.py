"""Lets a test process talk to its own machine only.

Python imports a module of this name at start-up, so with this folder on PYTHONPATH the processes that tests start are
guarded too. An audit hook sees whatever Python code connects to or sends, by any library, and stays in to the end.
"""

import gc
import ipaddress
import socket
import sys

_RESOLVING_EVENTS = ("socket.getaddrinfo", "socket.gethostbyname")
_SENDING_EVENTS = ("socket.connect", "socket.sendto", "socket.sendmsg")
_INTERNET = (socket.AF_INET, socket.AF_INET6)


def _is_local(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode()
    if host is None or host in ("", "localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified or _is_own(address)


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether it is one of this machine's network cards, which alone a socket can be bound to."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def _guard(event: str, arguments: tuple[object, ...]) -> None:
    host = arguments[0] if event in _RESOLVING_EVENTS else None
    if event in _SENDING_EVENTS:
        connection, address = arguments[:2]
        # A connected socket sends to no address; other families, such as Unix sockets, never leave the machine.
        if isinstance(address, tuple) and getattr(connection, "family", None) in _INTERNET:
            host = address[0]
    if not _is_local(host):
        raise RuntimeError(f"tests may not use the network, but something wants to reach {host!r}")


sys.addaudithook(_guard)
# Imports make many objects and hardly any garbage; to look for it as often as Python does takes each process a second.
gc.set_threshold(100_000)
