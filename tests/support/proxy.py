"""A TCP proxy before a server, for the faults that neither end of a connection makes by itself."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Final

_CHUNK_BYTES: Final = 1 << 16


class Proxy:
    """Hands on what it gets, until told otherwise."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._links: list[_Link] = []
        #: Called with each request before it is handed on.
        self.before: Callable[[bytes], object] = lambda _: None
        #: A request that holds this is carried out, and its connection dies before the reply.
        self.swallow: bytes | None = None
        #: Whether new connections are closed at once.
        self.refusing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def mute(self) -> None:
        """Hand on nothing more over the connections there are, and leave them open."""
        for link in self._links:
            link.muted = True

    def cut(self) -> None:
        """Close the connections there are."""
        for link in self._links:
            link.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    if self.refusing:
                        raise ConnectionRefusedError
                    self._links.append(_Link(self, client, self._server_port))
                except OSError:
                    client.close()


class _Link:
    """One connection."""

    def __init__(self, proxy: Proxy, client: socket.socket, port: int) -> None:
        self._proxy = proxy
        self._client = client
        self._server = socket.create_connection(("127.0.0.1", port))
        self.muted = False
        self._swallowing = False
        for pump in (self._requests, self._replies):
            threading.Thread(target=self._run, args=(pump,), daemon=True).start()

    def close(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _run(self, pump: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            pump()
        self.close()

    def _requests(self) -> None:
        while data := self._client.recv(_CHUNK_BYTES):
            self._proxy.before(data)
            word = self._proxy.swallow
            if word is not None and word in data:
                self._proxy.swallow, self._swallowing = None, True
            if not self.muted:
                self._server.sendall(data)

    def _replies(self) -> None:
        while (data := self._server.recv(_CHUNK_BYTES)) and not self._swallowing:
            if not self.muted:
                self._client.sendall(data)


@contextlib.contextmanager
def running_proxy(port: int) -> Iterator[Proxy]:
    """Run a proxy before the server on ``port`` for the length of the block."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
