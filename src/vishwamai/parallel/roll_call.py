"""A roll call before JAX's distributed runtime starts: every process says who it is, and process 0 says who is missing.

JAX ends the process, without saying who is missing, when a peer does not come. So process 0 listens at the
coordinator's address first, and JAX's service takes the address over when all are there. One line of JSON each way.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping

from vishwamai.core.errors import ConfigError, DeviceError

_PAUSE = 0.1
"""Seconds between two attempts to reach process 0."""
_LINE = 5.0
"""Seconds in which a connection has to say who it is; others on the network may connect and say nothing."""


def answer(address: str, count: int, timeout: float) -> None:
    """Process 0: waits for the other processes.

    Raises:
      DeviceError: the port cannot be taken, or some have not come in time; those that have get the same text.
      ConfigError: one has another number of processes, or a number that is taken.
    """
    until = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listening(address))
        present: dict[int, socket.socket] = {}
        try:
            while len(present) < count - 1:
                missing = [str(i) for i in range(1, count) if i not in present]
                left = until - time.monotonic()
                if left <= 0:
                    raise DeviceError(
                        f"initialize: of {count} processes, {_numbered(missing)} did not come to {address} within "
                        f"{timeout:g} s; start every process with its number, and look at the output of the missing "
                        "ones, or raise `timeout`."
                    )
                server.settimeout(min(left, 1.0))  # short waits, so that the missing are named on time
                try:
                    connection = stack.enter_context(server.accept()[0])
                except TimeoutError:
                    continue
                # a silent stranger costs `_LINE` seconds, not the whole time
                _admit(_read(connection, min(left, _LINE)), connection, present, count)
        except (ConfigError, DeviceError) as error:
            for connection in present.values():
                _send(connection, {"error": type(error).__name__, "text": str(error)})
            raise
        for connection in present.values():
            _send(connection, {"go": count})
        for connection in present.values():  # they close first, which leaves the port free for JAX's service
            _read(connection, _LINE)


def call(address: str, process: int, count: int, timeout: float) -> None:
    """Another process: says who it is, and waits for process 0 to say that all are there.

    Raises:
      DeviceError: process 0 cannot be reached in time, or says that others are missing.
      ConfigError: the processes disagree.
    """
    until = time.monotonic() + timeout
    host, port = split_address(address)
    while True:
        left = until - time.monotonic()
        if left <= 0:
            raise DeviceError(
                f"initialize: process {process} of {count} could not reach process 0 at {address} within "
                f"{timeout:g} s; start process 0, check the address, or raise `timeout`."
            )
        try:
            connection = socket.create_connection((host, port), timeout=min(left, _LINE))
        except OSError:  # not there yet, or not yet resolvable
            time.sleep(min(_PAUSE, left))
            continue
        with connection:
            _send(connection, {"process": process, "count": count})
            # Process 0 may have begun to wait later than this one, by as long as this one waited for it.
            message = _read(connection, timeout + _LINE)
        if message is None:
            raise DeviceError(
                f"initialize: process 0 at {address} went away before all {count} processes were there; look at its "
                "output."
            )
        if "go" in message:
            return
        raise (ConfigError if message.get("error") == "ConfigError" else DeviceError)(str(message.get("text")))


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
      ConfigError: it is not of the form host:port.

    >>> split_address("10.0.0.1:8476"), split_address("[::1]:80")
    (('10.0.0.1', 8476), ('::1', 80))
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f'initialize: `coordinator` is {address!r}; pass the address of process 0 as host:port, "10.0.0.1:8476".'
        )
    return host.strip("[]"), int(port)


def _listening(address: str) -> socket.socket:
    _, port = split_address(address)
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise DeviceError(
            f"initialize: process 0 cannot listen at port {port}: {error.strerror or error}; pass an address with a "
            "free port to every process."
        ) from error


def _admit(
    message: Mapping[str, object] | None, connection: socket.socket, present: dict[int, socket.socket], count: int
) -> None:
    process = (message or {}).get("process")
    if message is None or not isinstance(process, int):
        return  # someone else on the network
    problem = None
    if message.get("count") != count:
        problem = f"process {process} says that there are {message.get('count')} processes, process 0 says {count}"
    elif not 0 < process < count or process in present:
        problem = f"two processes have the number {process}"
    if problem is not None:
        error = ConfigError(f"initialize: {problem}; give every process the same count and a number of its own.")
        _send(connection, {"error": "ConfigError", "text": str(error)})
        raise error
    present[process] = connection


def _send(connection: socket.socket, value: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):  # it has gone: the roll call's own timeout names it
        connection.sendall(json.dumps(value).encode() + b"\n")


def _read(connection: socket.socket, timeout: float) -> dict[str, object] | None:
    """A line of JSON; None where none comes in time."""
    until = time.monotonic() + timeout
    line = b"".join(_pieces(connection, until))
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _pieces(connection: socket.socket, until: float) -> Iterator[bytes]:
    with contextlib.suppress(OSError):
        while (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            piece = connection.recv(4096)
            yield piece
            if not piece or piece.endswith(b"\n"):
                return


def _numbered(missing: list[str]) -> str:
    numbers = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
    return f"process {numbers}" if len(missing) == 1 else f"processes {numbers}"
