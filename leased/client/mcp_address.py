"""Where `lease mcp --http` listens.  Apart from the server itself, so that a wrong address is told before the SDK is imported."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final, NamedTuple

PATH: Final = "/mcp"
_BACKLOG: Final = 128


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(text: str) -> Address:
    """ADDR:PORT with an IP address, IPv6 in brackets, or localhost.  Raises ValueError, whose text says what is taken."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    try:
        if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise ValueError
        return Address(str(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)), int(port))
    except ValueError:
        raise ValueError('is ADDR:PORT with an IP address, such as "127.0.0.1:8766" or "[::1]:8766"') from None


def listener(where: Address) -> socket.socket:
    """A socket that listens there; port 0 is any free one.  Raises OSError."""
    listening = socket.socket(socket.AF_INET6 if ":" in where.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((where.host, where.port))
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening
