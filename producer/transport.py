"""kombu's Redis transport, in which a queue called ``fleet.*`` is a set of streams.

Only the sending half: jobs are claimed by instances, never consumed through kombu. Every other
queue, fanout and remote control are kombu's own; but what is no message is dropped, where kombu
would raise and end a worker's parent.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Iterator
from typing import Any

import redis
from kombu.transport import redis as kombu_redis

from producer.contract.blobs import Blobs
from producer.contract.memory import is_full, overloaded
from producer.contract.names import Keys, is_stream_queue
from producer.contract.sentinel import MasterConnection, MasterTlsConnection, Sentinels
from producer.contract.settings import Settings
from producer.entries import commands_of
from producer.incoming import fault_of
from producer.purge import purge

logger = logging.getLogger(__name__)


class Channel(kombu_redis.Channel):
    """A channel whose ``fleet.*`` queues are streams."""

    #: Set by the transport option of the same name.
    fleet_max_body_bytes = 64 * 1024 * 1024

    #: As well: who says where the broker is; None where its URL does.
    fleet_sentinels: Sentinels | None = None

    #: As well: how large arrays are sent; None: as by default.
    fleet_blobs: Blobs | None = None

    from_transport_options: tuple[str, ...] = (
        *kombu_redis.Channel.from_transport_options,
        "fleet_max_body_bytes",
        "fleet_sentinels",
        "fleet_blobs",
    )

    _kept: redis.Redis | None = None

    @property
    def connection_class(self) -> type[redis.Connection]:
        return MasterConnection if self.fleet_sentinels else redis.Connection

    @property
    def connection_class_ssl(self) -> type[redis.Connection]:
        return MasterTlsConnection if self.fleet_sentinels else redis.SSLConnection

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        params: dict[str, Any] = super()._connparams(asynchronous)
        return {**params, "sentinels": self.fleet_sentinels} if self.fleet_sentinels else params

    @property
    def _keys(self) -> Keys:
        return Keys(prefix=self.global_keyprefix or "")

    @property
    def _blobs(self) -> Blobs:
        return self.fleet_blobs or Blobs.of(Settings(prefix=self.global_keyprefix or ""))

    @property
    def _streams(self) -> redis.Redis:
        """The client for streams: kept, and without kombu's prefixes, which miss these commands."""
        if self._kept is None:
            self._kept = redis.Redis(connection_pool=self.pool)
        return self._kept

    def _disconnect_pools(self) -> None:
        self._kept = None
        super()._disconnect_pools()

    def maybe_refresh_binding_expiry(self) -> None:
        """Renew the bindings of queues that expire, as remote control's do.

        A full server refuses it. kombu tries again a second later, well before they end, and would
        log a traceback each time.
        """
        try:
            super().maybe_refresh_binding_expiry()
        except redis.ResponseError as error:
            if not is_full(error):
                raise

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        if not is_stream_queue(queue):
            super()._put(queue, message, **kwargs)
            return
        limit_bytes = self.fleet_max_body_bytes
        commands, named = commands_of(queue, message, blobs=self._blobs, max_body_bytes=limit_bytes)
        commands = self._blobs.write_files(commands)
        batch = kwargs.pop("_publish_batch", None)
        if batch is not None:
            for command in commands:
                batch.add("execute_command", *command)
            return
        with self._streams.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            answers = pipe.execute(raise_on_error=False)
        if isinstance(answers[-1], redis.ResponseError):
            self._blobs.remove_files([named])
        for answer in answers:
            if isinstance(answer, redis.ResponseError) and is_full(answer):
                raise overloaded() from answer
            if isinstance(answer, Exception):
                raise answer

    def _receive_one(self, c: Any) -> Any:
        with self._dropping_what_cannot_be_decoded():
            return super()._receive_one(c)

    def _brpop_read(self, **options: Any) -> Any:
        with self._dropping_what_cannot_be_decoded():
            return super()._brpop_read(**options)

    @contextlib.contextmanager
    def _dropping_what_cannot_be_decoded(self) -> Iterator[None]:
        """Log and swallow what kombu's JSON raises; what a receiver raises goes through."""
        self.connection.handed_over = False
        try:
            yield
        except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            if self.connection.handed_over:
                raise
            logger.warning("message.dropped", extra={"reason": f"{type(error).__name__} in it"})

    def _size(self, queue: str) -> int:
        if not is_stream_queue(queue):
            return int(super()._size(queue))
        with self._streams.pipeline(transaction=False) as pipe:
            for stream in self._keys.streams(queue):
                pipe.xlen(stream)
            return sum(pipe.execute())

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        if not is_stream_queue(queue):
            return bool(super()._has_queue(queue, **kwargs))
        return bool(self._streams.exists(*self._keys.streams(queue)))

    def _purge(self, queue: str) -> int:
        """Delete the jobs that wait; what an instance has claimed is left to it."""
        if not is_stream_queue(queue):
            return int(super()._purge(queue))
        return purge(self._streams, self._blobs, queue)

    def _delete(
        self, queue: str, exchange: str, routing_key: str, pattern: str, *args: Any, **kwargs: Any
    ) -> None:
        super()._delete(queue, exchange, routing_key, pattern, *args, **kwargs)
        if is_stream_queue(queue):
            self._streams.delete(*self._keys.streams(queue), self._keys.delayed(queue))

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        # A queue of ours is always bound to its own name: nothing to keep in Redis for ever.
        if not is_stream_queue(queue):
            super()._queue_bind(exchange, routing_key, pattern, queue)

    def get_table(self, exchange: str) -> list[Any]:
        if is_stream_queue(exchange):
            return [(exchange, "", exchange)]
        return list(super().get_table(exchange))


class Transport(kombu_redis.Transport):
    """``fleet://``."""

    Channel = Channel

    #: Whether the message that is being received has reached whom it is for.
    handed_over = False

    #: A worker's loop, and what was put there to be called on each of its turns.
    _loop: Any = None
    _ticks: frozenset[Any] = frozenset()

    def _deliver(self, message: Any, queue: str) -> None:
        fault = fault_of(message)
        if fault is not None:
            logger.warning("message.dropped", extra={"queue": queue, "reason": fault})
            return
        self.handed_over = True
        super()._deliver(message, queue)

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        before = set(loop.on_tick)
        super().register_with_event_loop(connection, loop)
        self._loop, self._ticks = loop, loop.on_tick - before

    def close_connection(self, connection: Any) -> None:
        """Close it and leave the worker's loop.

        kombu 5.7 stays there: after each reconnect one more closed transport would be called on
        every turn of the loop, for ever.
        """
        if self._loop is not None:
            self._loop.on_tick.difference_update(self._ticks)
        super().close_connection(connection)


class TlsTransport(Transport):
    """``fleets://``: TLS with a verified certificate, whatever the URL or the options say."""

    def __init__(self, client: Any, **kwargs: Any) -> None:
        options = client.ssl if isinstance(client.ssl, dict) else {}
        client.ssl = {"ssl_check_hostname": True, **options, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        super().__init__(client, **kwargs)
