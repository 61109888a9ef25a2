"""The address that a server is to listen on, tried before anything is loaded."""

from __future__ import annotations

import errno
import socket

from vishwamai.cli.function import CommandError


def check_address(host: str, port: int) -> None:
    """Tries to listen there.

    Raises:
      CommandError: the port is not a port, it is in use or needs rights, or the host is not an address of this machine.
    """
    if not 0 <= port <= 65535:
        raise CommandError(f"--port is {port}; pass 1 to 65535, or 0 for any port that is free.")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn: a port that has just been left
            server.bind(place)
    except socket.gaierror as error:
        raise CommandError(f"--host {host} is not an address: {error.strerror}; pass 127.0.0.1 or 0.0.0.0.") from error
    except OSError as error:
        raise CommandError(f"--host {host} --port {port}: {_reason(error)}.") from error


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another process listens there; pass another --port, or 0 for any that is free"
    if error.errno == errno.EACCES:
        return "ports below 1024 need rights that this process lacks; pass a --port from 1024 on"
    if error.errno == errno.EADDRNOTAVAIL:
        return "the host is not an address of this machine; pass 127.0.0.1, or 0.0.0.0 for all of its addresses"
    return f"{error.strerror}; pass another address"
