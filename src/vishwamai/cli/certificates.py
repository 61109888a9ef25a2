"""The certificate of a server, checked before a model loads."""

from __future__ import annotations

import ssl
from pathlib import Path

from vishwamai.cli.function import CommandError


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Checks that TLS can be served with these files.

    Args:
      certificate: PEM file with the server's certificate and those between it and its authority; None: no TLS.
      key: PEM file with its private key, without a password; None: the certificate's file has it.

    Raises:
      CommandError: one of them cannot be read, or the two do not belong together.
    """
    if certificate is None:
        if key is not None:
            raise CommandError("--ssl-keyfile is the key of a certificate; pass --ssl-certfile too.")
        return
    for option, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        try:
            if path is not None:
                path.read_bytes()
        except OSError as error:
            raise CommandError(f"{option} {path}: {error.strerror}; pass a PEM file.") from error
    try:
        # Without a function for the password, OpenSSL asks the terminal for it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        files = f"{certificate}" if key is None else f"{certificate} and {key}"
        raise CommandError(
            f"--ssl-certfile: {files} cannot be served ({error}); pass PEM files of a certificate and of its private "
            "key without a password."
        ) from error
