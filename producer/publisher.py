"""The connections that carry jobs to the broker: kept, shared by threads, renewed after a fork.

One command is one write and one read on a kept connection, beside Celery's way through kombu, which
costs several times as much. Nothing here knows what a job is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import redis
from kombu.exceptions import OperationalError

from producer.contract.names import Keys
from producer.contract.settings import Settings, redacted, redis_client
from producer.transport import is_full, overloaded

#: How long the list of models that workers serve is believed.
MODELS_FRESH_S = 1.0

Argument = bytes | str | int | float


def pack_command(arguments: Sequence[Argument]) -> bytes:
    """Return a Redis command as it is sent."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        parts += (b"$%d\r\n" % len(data), data, b"\r\n")
    return b"".join(parts)


class Publisher:
    """Sends commands to the broker; opens a connection when one is needed."""

    def __init__(self, settings: Settings) -> None:
        self.keys = Keys(prefix=settings.prefix)
        self._url = settings.broker_url
        self._pool = redis_client(settings.broker_url).connection_pool
        self._idle: list[Any] = []
        self._pid = os.getpid()
        self._models: frozenset[str] = frozenset()
        self._models_read_at = -MODELS_FRESH_S

    def send(self, *commands: Sequence[Argument]) -> list[Any]:
        """Run ``commands`` in one round trip and return their replies.

        They are sent again, once, when the connection was dropped: each must be one that may
        happen twice. Raises OperationalError when the broker cannot be reached or refuses,
        Overloaded when its memory is full.
        """
        packed = [pack_command(command) for command in commands]
        try:
            replies = self._round_trip(packed)
        except redis.AuthenticationError as error:
            raise OperationalError(f"{self._where} refused the credentials: {error}") from error
        except (redis.RedisError, OSError) as error:
            raise OperationalError(f"{self._where} cannot be reached: {error}") from error
        for reply in replies:
            if isinstance(reply, redis.RedisError):
                if is_full(reply):
                    raise overloaded() from reply
                raise OperationalError(f"{self._where} refused a command: {reply}") from reply
        return replies

    def known_models(self, wanted: str) -> frozenset[str]:
        """Return the models that workers serve; read again when stale, or before a refusal."""
        now = time.monotonic()
        would_refuse = bool(self._models) and wanted not in self._models
        if would_refuse or now - self._models_read_at > MODELS_FRESH_S:
            (names,) = self.send(("ZRANGEBYSCORE", self.keys.models, time.time(), "+inf"))
            self._models = frozenset(name.decode() for name in names)
            self._models_read_at = now
        return self._models

    def close(self) -> None:
        """Close the connections that are not in use."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    @property
    def _where(self) -> str:
        return f"The broker {redacted(self._url)} (FLEET_BROKER_URL)"

    def _round_trip(self, packed: list[bytes]) -> list[Any]:
        connection = self._take()
        if connection is not None:
            try:
                return self._exchange(connection, packed)
            except redis.ConnectionError:
                # Dropped while it was idle or in use; the others may have gone with it.
                self.close()
        connection = self._pool.make_connection()
        connection.connect()
        return self._exchange(connection, packed)

    def _take(self) -> Any:
        """Return an idle connection of this process, or None."""
        if self._pid != os.getpid():
            # The parent's connections: a forked child must not write to them.
            self._idle, self._pid = [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _exchange(self, connection: Any, packed: list[bytes]) -> list[Any]:
        replies: list[Any] = []
        try:
            connection.send_packed_command(packed)
            for _ in packed:
                try:
                    replies.append(connection.read_response())
                except redis.ResponseError as error:
                    replies.append(error)
        except BaseException:
            # Half a conversation: nobody may read what is left of it.
            connection.disconnect()
            raise
        self._idle.append(connection)
        return replies
