"""kombu's Redis transport, in which a queue called ``fleet.*`` is a set of streams.

Only the sending half: jobs are claimed by instances, never consumed through kombu. Every other
queue, fanout and remote control are kombu's own; but what is no message is dropped, where kombu
would raise and end a worker's parent.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import logging
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgpack
import redis
from kombu.compression import decompress
from kombu.transport import redis as kombu_redis

from producer.contract import wire
from producer.contract.blobs import Blobs, Named, Spilled
from producer.contract.errors import BadRequest, Overloaded
from producer.contract.message import Message, to_fields
from producer.contract.names import FREE, GROUP, PRIORITIES, Keys, Priority, is_stream_queue
from producer.contract.sentinel import MasterConnection, MasterTlsConnection, Sentinels
from producer.contract.settings import Settings

logger = logging.getLogger(__name__)

#: Properties that say something about one hop of a message and nothing about the job.
_HOP_PROPERTIES: Final = ("body_encoding", "delivery_tag", "argsrepr", "kwargsrepr")

#: Deletes what waits in one stream, large arrays too, and leaves what is claimed. A full Redis
#: allows all of it. KEYS: stream. ARGV: group, the consumer of given-back entries, how many at
#: most, the prefix of blob keys.
_PURGE: Final = """
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
local after = '-'
if not groups.err then
    for _, group in ipairs(groups) do
        local fields = {}
        for i = 1, #group, 2 do fields[group[i]] = group[i + 1] end
        if fields['name'] == ARGV[1] then after = '(' .. fields['last-delivered-id'] end
    end
end
local deleted = 0
local function delete(id)
    local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
    for i = 1, entry and #entry[2] or 0, 2 do
        local large = entry[2][i] == 'blobs'
            and string.match(entry[2][i + 1], '^%d+ redis ([%x ]+)$')
        for name in string.gmatch(large or '', '%x+') do redis.call('DEL', ARGV[4] .. name) end
    end
    deleted = deleted + redis.call('XDEL', KEYS[1], id)
end
if after ~= '-' then
    for _, entry in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[3], ARGV[2])) do
        redis.call('XACK', KEYS[1], ARGV[1], entry[1])
        delete(entry[1])
    end
end
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], after, '+', 'COUNT', ARGV[3])) do
    delete(entry[1])
end
return deleted
"""
_PURGE_AT_ONCE: Final = 200


def priority_of(headers: Mapping[str, Any], number: object) -> Priority:
    """Return a job's priority: our header when it is there, else Celery's number."""
    name = headers.get("fleet_priority", number)
    if isinstance(name, str) and name in PRIORITIES:
        return Priority(name)
    return Priority.LOW if isinstance(number, int) and number > 0 else Priority.NORMAL


def due_unix_s(headers: Mapping[str, Any]) -> float | None:
    """Return when a job with an ``eta`` is due; None when it may run at once."""
    eta = headers.get("eta")
    if not isinstance(eta, str):
        return None
    due = datetime.datetime.fromisoformat(eta)
    if due.tzinfo is None:
        due = due.replace(tzinfo=datetime.UTC)
    return due.timestamp()


def pack_delayed(fields: Mapping[str, Any], priority: Priority) -> bytes:
    """Pack a stream entry that waits in the delayed set, with the stream it will go to."""
    # The old string type for bytes too: the script that moves it, Redis's own Lua, knows no other.
    packed: bytes = msgpack.packb({**fields, "priority": str(priority)}, use_bin_type=False)
    return packed


def check_size(size_bytes: int, limit_bytes: int) -> None:
    """Refuse a packed job that is larger than the fleet takes."""
    if size_bytes > limit_bytes:
        raise BadRequest(
            f"The packed job has {size_bytes:,} bytes; the limit is {limit_bytes:,} "
            "(FLEET_MAX_BODY_BYTES). Send fewer rows per job."
        )


def fault_of(message: Any) -> str | None:
    """Return why a decoded ``message`` is none that kombu can take in; None when it is one."""
    if not isinstance(message, dict):
        return "it is not a map"
    properties = message.get("properties")
    if not isinstance(properties, dict):
        return "it has no map of properties"
    if not isinstance(properties.get("delivery_tag"), str | int):
        return "it has no delivery tag"
    for name, part in (
        ("headers", message.get("headers")),
        ("delivery info", properties.get("delivery_info")),
    ):
        if not isinstance(part, dict | None):
            return f"its {name} are not a map"
    for name in ("content-type", "content-encoding"):
        if not isinstance(message.get(name), str | None):
            return f"its {name} is not text"
    return _fault_of_body(message.get("body"), properties.get("body_encoding"))


def _fault_of_body(body: object, encoding: object) -> str | None:
    if not isinstance(body, str | bytes | None):
        return "its body is not text"
    if not encoding or (isinstance(encoding, str) and encoding.lower() == "utf-8"):
        return None
    if encoding != "base64":
        return f"its body encoding is not one of kombu's: {encoding!r:.40}"
    try:
        base64.b64decode(body or "")
    except ValueError:
        return "its body is not base64"
    return None


def is_full(error: Exception) -> bool:
    """Return whether Redis refused a write because its memory is used up."""
    return isinstance(error, redis.ResponseError) and (
        type(error).__name__ == "OutOfMemoryError" or "OOM command not allowed" in str(error)
    )


def overloaded() -> Overloaded:
    """Return the error of a job that a full Redis did not take."""
    return Overloaded(
        "Redis is full (maxmemory) and takes no new jobs. Send again later, add workers, "
        "or give Redis more memory."
    )


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
        commands, named = self._commands(queue, message)
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

    def _commands(self, queue: str, message: dict[str, Any]) -> tuple[list[Sequence[Any]], Named]:
        """Return the commands that put ``message``, its large arrays first, where it waits; and
        these arrays.
        """
        properties = dict(message["properties"])
        body = message["body"]
        if properties.get("body_encoding") == "base64":
            body = base64.b64decode(body)
        elif isinstance(body, str):
            body = body.encode()
        headers = dict(message["headers"])
        # The app's task_compression: arrays hardly shrink, and a worker opens no bomb.
        if compression := headers.pop("compression", None):
            body = decompress(body, compression)
        check_size(len(body), self.fleet_max_body_bytes)
        for name in _HOP_PROPERTIES:
            properties.pop(name, None)
        ours = message["content-type"] == wire.CONTENT_TYPE
        spilled = self._blobs.spill(body) if ours else Spilled(body=body)
        fields = to_fields(
            Message(
                headers=headers,
                properties=properties,
                content_type=message["content-type"],
                content_encoding=message["content-encoding"],
                body=spilled.body,
            ),
            job_id=str(headers.get("id", "")),
            rows=int(headers.get("fleet_rows", 1)),
            blobs=str(spilled.named),
        )
        priority = priority_of(headers, properties.get("priority"))
        due, now_unix_s = due_unix_s(headers), time.time()
        if due is not None and due > now_unix_s:
            packed = pack_delayed(fields, priority)
            command: list[Any] = ["ZADD", self._keys.delayed(queue), due, packed]
            ttl_s = self._blobs.input_ttl_s(due_in_s=due - now_unix_s)
        else:
            pairs = [part for pair in fields.items() for part in pair]
            command = ["XADD", self._keys.stream(queue, priority), "*", *pairs]
            ttl_s = self._blobs.input_ttl_s()
        return self._blobs.commands(spilled, command, ttl_s=ttl_s), spilled.named

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
        delayed = self._keys.delayed(queue)
        with self._streams.pipeline(transaction=False) as pipe:
            pipe.zcard(delayed)
            pipe.delete(delayed)
            purged = int(pipe.execute()[0])
        return purged + sum(sum(self._purge_stream(key)) for key in self._keys.streams(queue))

    def _purge_stream(self, stream: str) -> Iterator[int]:
        deleted = _PURGE_AT_ONCE
        while deleted >= _PURGE_AT_ONCE:
            told = (GROUP, FREE, str(_PURGE_AT_ONCE), self._keys.blob(""))
            deleted = int(self._streams.eval(_PURGE, 1, stream, *told))
            yield deleted

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
