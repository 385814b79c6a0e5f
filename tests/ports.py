"""Ports of loopback."""

import socket


def free_port() -> int:
    """A port that is free now; another process may take it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
