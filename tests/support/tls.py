"""TLS in front of a test server: the embedded Valkey speaks none, so a proxy ends it before it.

Certificates are made by the `openssl` command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A certificate that is its own authority, with its key."""

    path: Path
    key: Path


def make_certificate(folder: Path, *names: str) -> Certificate:
    """Make a certificate for ``names``, such as ``DNS:localhost`` or ``IP:127.0.0.1``."""
    if shutil.which("openssl") is None:
        if "CI" in os.environ:
            pytest.fail("the tests of TLS need the command openssl")
        pytest.skip("the command openssl is not here")
    made = Certificate(path=folder / "certificate.pem", key=folder / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=fleet test"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-addext", f"subjectAltName={','.join(names)}"),
            *("-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
            *("-keyout", str(made.key), "-out", str(made.path)),
        ],
        check=True,
        capture_output=True,
    )
    return made


@contextlib.contextmanager
def tls_before(port: int, certificate: Certificate) -> Iterator[int]:
    """Speak TLS on a port of its own, which is returned, for what listens on ``port``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.path, certificate.key)
    ending = threading.Event()
    threads: list[threading.Thread] = []

    def accept() -> None:
        # Until it is closed.
        with contextlib.suppress(OSError):
            while True:
                outer, _ = listener.accept()
                threads.append(threading.Thread(target=forward, args=(outer,), name="tls-proxy"))
                threads[-1].start()

    def forward(outer: socket.socket) -> None:
        with (
            outer,
            contextlib.suppress(OSError),
            context.wrap_socket(outer, server_side=True) as tls,
            socket.create_connection(("127.0.0.1", port)) as inner,
        ):
            _pass_on(tls, inner, ending)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads.append(threading.Thread(target=accept, name="tls-listener"))
        threads[0].start()
        try:
            yield listener.getsockname()[1]
        finally:
            # First, so that whoever connects again is refused and not left with half a handshake.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            ending.set()
            for thread in threads:
                thread.join(10)


def _pass_on(tls: ssl.SSLSocket, inner: socket.socket, ending: threading.Event) -> None:
    """Pass on what each side says, until one has no more to say."""
    while not ending.is_set():
        readable = [tls] if tls.pending() else select.select([tls, inner], [], [], 0.1)[0]
        for source in readable:
            data = source.recv(65536)
            if not data:
                return
            (inner if source is tls else tls).sendall(data)
