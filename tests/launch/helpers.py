"""What tests of jobs share."""

import socket


def free_port():
    """One that nobody listens at, on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
