"""Ports for servers of tests, which nobody else gets while their server is dead or not up yet."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from typing import Final

_HOST: Final = "127.0.0.1"
#: The nodes of a cluster talk on a port so far above.
_BUS: Final = 10_000


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """Give a port, and the one 10,000 above it, for the length of the block.

    A socket that is bound to it and listens to nobody keeps the kernel from giving it to whoever
    asks for any port; a server that asks for it by its number may have it beside that.
    """
    with contextlib.ExitStack() as stack:
        port = _bind_both(stack)
        if sys.platform != "linux":
            # Elsewhere the server could not have it meanwhile.
            stack.close()
        yield port


def _bind_both(stack: contextlib.ExitStack) -> int:
    while True:
        with contextlib.ExitStack() as both, contextlib.suppress(OSError, OverflowError):
            port = _bound(both, 0)
            _bound(both, port + _BUS)
            stack.enter_context(both.pop_all())
            return port


def _bound(stack: contextlib.ExitStack, port: int) -> int:
    keeper = stack.enter_context(socket.socket())
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind((_HOST, port))
    return int(keeper.getsockname()[1])
