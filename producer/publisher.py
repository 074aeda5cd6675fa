"""The connections that carry jobs to the broker: kept, shared by threads, renewed after a fork.

One command is one write and one read on a kept connection, beside Celery's way through kombu, which
costs several times as much. Nothing here knows what a job is.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import redis
from kombu.exceptions import OperationalError

from producer.contract.blobs import Blobs, again, is_file, named_by
from producer.contract.greeting import HELLO, read_greeting, refuse_cluster
from producer.contract.memory import INFO_MEMORY, Memory, is_full, overloaded, read_memory, too_full
from producer.contract.names import Keys
from producer.contract.settings import CONNECT_TIMEOUT_S, Settings, redacted, redis_client
from producer.stand_in import stand_in

logger = logging.getLogger(__name__)

#: How long it is believed which models workers serve, and how full the broker is.
FRESH_S = 1.0
#: A broker that does not tell how full it is is not asked again before this.
_ASK_AGAIN_S: Final = 60.0
#: No answer in this time is an error: whoever sends would rather know than wait.
_ANSWER_S: Final = 5.0
#: A connection that was idle for longer may be dead without anybody knowing: it is asked first.
_IDLE_S: Final = 10.0
#: What is written at once, within the time above. So a large job has time on a slow line.
_PIECE_BYTES: Final = 1024 * 1024

Argument = bytes | memoryview | str | int | float
#: Not `bytes | memoryview`, which would be made anew for every argument of a command.
_RAW: Final = (bytes, memoryview)


def pack_command(arguments: Sequence[Argument]) -> bytes:
    """Return a Redis command as it is sent."""
    parts: list[bytes | memoryview] = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        data = argument if isinstance(argument, _RAW) else str(argument).encode()
        parts += (b"$%d\r\n" % len(data), data, b"\r\n")
    return b"".join(parts)


@dataclasses.dataclass(slots=True)
class _Sent:
    """How often commands were sent, or a part of them: never, where no connection was made."""

    times: int = 0


class Publisher:
    """Sends commands to the broker; opens a connection when one is needed."""

    def __init__(self, settings: Settings) -> None:
        self.keys = Keys(prefix=settings.prefix)
        self.blobs = Blobs.of(settings)
        self._url = settings.broker_url
        # The pool only makes connections, and counts all that it ever made.
        options = {"socket_timeout": _ANSWER_S, "health_check_interval": 0}
        self._pool = redis_client(settings.broker_url, **options).connection_pool
        #: Connections and when they were last used, in monotonic time.
        self._idle: list[tuple[Any, float]] = []
        self._pid = os.getpid()
        self._watermark = settings.memory_watermark
        self._models: frozenset[str] = frozenset()
        self._memory: Memory | None = None
        self._ask_memory_at = 0.0
        self._looked_at = -FRESH_S
        self._greeted = False
        #: Whether it was said that nobody serves anything.
        self._said_none = False

    def send(self, *commands: Sequence[Argument]) -> list[Any]:
        """Run ``commands`` in one round trip and return their replies.

        Raises OperationalError when the broker cannot be reached or refuses one of them,
        Overloaded when its memory is full.
        """
        replies = self.replies(commands)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def replies(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """As `send`; the error of a command that was refused stands where its reply would.

        They are sent again, once, when the connection was dropped: each must be one that may
        happen twice.
        """
        if (here := stand_in()) is not None:
            return here.take(commands)
        replies = iter(self._replies(self.blobs.write_files(commands)))
        return [b"OK" if is_file(command) else next(replies) for command in commands]

    def _replies(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        sent = _Sent()
        try:
            replies = self._round_trip(commands, sent)
        except (redis.RedisError, OSError) as error:
            if not sent.times:
                self._remove_files(commands)
            what = "cannot be reached"
            if isinstance(error, redis.AuthenticationError):
                what = "refused the credentials"
            raise OperationalError(f"{self._where} {what}: {error}") from error
        refused = [isinstance(reply, redis.RedisError) for reply in replies]
        # What was sent twice may have been taken the first time.
        if sent.times == 1 and any(refused):
            self._remove_files(itertools.compress(commands, refused))
        return [
            self._refusal(reply) if isinstance(reply, redis.RedisError) else reply
            for reply in replies
        ]

    def _remove_files(self, commands: Iterable[Sequence[Argument]]) -> None:
        """Delete the files of jobs that were not accepted, which is certain."""
        self.blobs.remove_files(map(named_by, commands))

    def known_models(self, wanted: str) -> frozenset[str]:
        """Return the models that workers serve; read again when stale, or before a refusal."""
        if (here := stand_in()) is not None:
            return here.models
        would_refuse = bool(self._models) and wanted not in self._models
        self._look(at_once=would_refuse)
        return self._models

    def admit(self) -> None:
        """Raise Overloaded while the broker's memory is so full that workers need the rest.

        To be called before jobs are sent; what else is sent is never held back. Read again when
        stale, or before a refusal.
        """
        if stand_in() is not None:
            return
        self._look()
        memory = self._memory
        if memory and memory.is_above(self._watermark):
            self._look(at_once=True)
            memory = self._memory
        if memory and memory.is_above(self._watermark):
            raise too_full(memory, self._watermark)

    def _look(self, *, at_once: bool = False) -> None:
        """Read what is to be known before jobs are sent, in one round trip, when it is stale."""
        now = time.monotonic()
        if now - self._looked_at <= FRESH_S and not at_once:
            return
        asked: dict[str, Sequence[Argument]] = {
            "models": ("ZRANGEBYSCORE", self.keys.models, time.time(), "+inf")
        }
        if not self._greeted:
            asked["greeting"] = HELLO
        if now >= self._ask_memory_at:
            asked["memory"] = INFO_MEMORY
        replies = dict(zip(asked, self.replies(list(asked.values())), strict=True))
        if "greeting" in replies:
            refuse_cluster(read_greeting(replies["greeting"]), self._url)
            self._greeted = True
        if "memory" in replies:
            self._memory = read_memory(replies["memory"])
            self._ask_memory_at = 0.0 if self._memory else now + _ASK_AGAIN_S
        if isinstance(replies["models"], Exception):
            raise replies["models"]
        self._models = frozenset(name.decode() for name in replies["models"])
        self._looked_at = now
        self._say_when_none()

    def _say_when_none(self) -> None:
        """Log, once, that jobs wait under a prefix where there was no worker.

        It may be that of an app alone: which other prefixes there are nobody can ask, for all keys
        of the server would have to be read.
        """
        if not self._models and not self._said_none:
            logger.warning(
                "models.none: no worker has served a model under FLEET_PREFIX %r within a day, so "
                "jobs wait. Start a worker; if one runs, its FLEET_PREFIX is another.",
                self.keys.prefix,
            )
        self._said_none = not self._models

    def close(self) -> None:
        """Close the connections that are not in use."""
        idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.disconnect()

    @property
    def _where(self) -> str:
        return f"The broker {redacted(self._url)} (FLEET_BROKER_URL)"

    def _refusal(self, error: redis.RedisError) -> Exception:
        if is_full(error):
            refusal: Exception = overloaded()
        else:
            refusal = OperationalError(f"{self._where} refused a command: {error}")
        refusal.__cause__ = error
        return refusal

    def _round_trip(self, commands: Sequence[Sequence[Argument]], sent: _Sent) -> list[Any]:
        connection = self._take()
        if connection is not None:
            try:
                sent.times += 1
                return self._exchange(connection, commands)
            except redis.ConnectionError:
                # Dropped while it was idle or in use; the others may have gone with it.
                self.close()
                commands = [again(command) for command in commands]
        connection = self._pool.make_connection()
        connection.connect()
        sent.times += 1
        return self._exchange(connection, commands)

    def _take(self) -> Any:
        """Return an idle connection of this process that is alive, or None."""
        if self._pid != os.getpid():
            # The parent's connections: a forked child must not write to them.
            self._idle, self._pid = [], os.getpid()
        while True:
            try:
                connection, used_s = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - used_s < _IDLE_S or _answers(connection):
                return connection
            connection.disconnect()

    def _exchange(self, connection: Any, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        replies: list[Any] = []
        packed = [pack_command(command) for command in commands]
        try:
            connection.send_packed_command(_pieces(packed))
            for _ in packed:
                try:
                    replies.append(connection.read_response())
                except redis.ResponseError as error:
                    replies.append(error)
        except BaseException:
            # Half a conversation: nobody may read what is left of it.
            connection.disconnect()
            raise
        self._idle.append((connection, time.monotonic()))
        return replies


def _pieces(packed: Sequence[bytes]) -> Iterator[bytes | memoryview]:
    """Yield ``packed`` in the pieces that are written one by one: small ones together."""
    small: list[bytes] = []
    small_bytes = 0
    for command in packed:
        if small and small_bytes + len(command) > _PIECE_BYTES:
            yield b"".join(small)
            small, small_bytes = [], 0
        if len(command) <= _PIECE_BYTES:
            small.append(command)
            small_bytes += len(command)
            continue
        view = memoryview(command)
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]
    if small:
        yield b"".join(small)


def _answers(connection: Any) -> bool:
    """Return whether an idle connection is alive."""
    try:
        connection.send_command("PING")
        return bool(connection.can_read(timeout=CONNECT_TIMEOUT_S) and connection.read_response())
    except (redis.RedisError, OSError):
        return False
