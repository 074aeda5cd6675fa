"""The Redis behind Sentinels: every new connection asks them which server is the master now.

So nothing has to be told of a failover: Sentinel drops the connections of a master that it demotes,
those of a dead one break, and whoever connects again is led to the new one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import redis

Address = tuple[str, int]

#: What a Sentinel listens on unless it is told otherwise.
DEFAULT_PORT: Final = 26379


@dataclasses.dataclass(slots=True, kw_only=True)
class Sentinels:
    """The Sentinels that watch over one master."""

    addresses: tuple[Address, ...]
    #: The name they know the master by.
    master: str
    #: How to connect to one of them: arguments of `connection_class`, secrets among them.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    connection_class: type[redis.Connection] = redis.Connection
    #: Who knew the master last: asked first, so that one that is gone does not delay every time.
    _knew: Address | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def __json__(self) -> str:
        """Return what Celery's `inspect` tells of it among the options of the transport."""
        return repr(self)

    def master_address(self) -> Address:
        """Return where the master is, from the first Sentinel that knows."""
        refusals = []
        for address in sorted(self.addresses, key=lambda address: address != self._knew):
            where = "{}:{}".format(*address)
            try:
                found = self._ask(address)
            except (redis.RedisError, OSError) as error:
                refusals.append(f"{where}: {error}")
                continue
            if found is not None:
                self._knew = address
                return found
            refusals.append(f"{where} knows no master of this name")
        raise redis.ConnectionError(
            f"No Sentinel says where the master {self.master!r} is: {'; '.join(refusals)}."
        )

    def _ask(self, address: Address) -> Address | None:
        host, port = address
        connection = self.connection_class(host=host, port=port, **self.options)
        try:
            connection.connect()
            connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.master)
            answer: Any = connection.read_response()
        finally:
            connection.disconnect()
        return (answer[0].decode(), int(answer[1])) if answer else None


class _ToMaster:
    """What a connection to a master does otherwise than one to a fixed address."""

    def __init__(self, *, sentinels: Sentinels, **options: Any) -> None:
        self._sentinels = sentinels
        super().__init__(**options)

    def _connect(self) -> Any:
        # Every way to a new socket leads through here, in all versions of redis-py.
        self.host, self.port = self._sentinels.master_address()
        return super()._connect()  # type: ignore[misc]

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except redis.ResponseError as error:
            if not _from_a_replica(error):
                raise
            # It was the master when we connected. The next connection asks again.
            self.disconnect()  # type: ignore[attr-defined]
            raise redis.ConnectionError(f"The master is another server now ({error}).") from error


def _from_a_replica(error: redis.ResponseError) -> bool:
    # A script of 6.2 has the code within its own text.
    return isinstance(error, redis.exceptions.ReadOnlyError) or "-READONLY " in str(error)


class MasterConnection(_ToMaster, redis.Connection):
    """A connection to the master that Sentinels name."""


class MasterTlsConnection(_ToMaster, redis.SSLConnection):
    """The same with TLS: the certificate must be for the name or address that Sentinels give."""
