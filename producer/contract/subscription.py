"""A subscription that outlives its connection.

It is renewed when it was cut, and when it is silent though the socket says that all is well. What
is published meanwhile is told to nobody: whoever uses one reads what it waits for beside it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import redis

logger = logging.getLogger(__name__)

#: A connection that was silent for so long is asked for a PONG, and given up after as long again.
_SILENT_S: Final = 5.0
#: The shortest and longest pause between attempts to connect. The first attempt comes at once.
_PAUSE_S: Final = (0.05, 1.0)
#: A connection that lasted so long was a good one.
_LASTED_S: Final = 1.0
#: The end of so many channels is waited for by nobody: their connection is closed instead.
_KEPT_CHANNELS: Final = 8
#: Messages taken in at once.
_NEWS_AT_ONCE: Final = 1000


class News(NamedTuple):
    """One message."""

    channel: bytes
    data: bytes


class Subscription:
    """Hears some channels at a time; one thread may use it."""

    def __init__(self, client: redis.Redis) -> None:
        """Use connections of ``client``, which must not check their health by itself."""
        self._client = client
        self._channels: tuple[bytes, ...] = ()
        self._pubsub: Any = None
        self._asked = False
        self._unconfirmed: set[bytes] = set()
        self._begun_s = self._heard_s = time.monotonic()
        self._pinged = False
        self._pause_s, self._next_s = 0.0, 0.0

    def begin(self, channels: Sequence[bytes]) -> None:
        """Hear ``channels`` from the next `news` on."""
        self._channels, self._asked = tuple(channels), False

    def news(self, timeout_s: float) -> list[News] | None:
        """Return what is heard within ``timeout_s``; None when it hears from now on, or again.

        What was published before is lost then. While Redis cannot be reached nothing is heard.
        """
        try:
            return self._hear(timeout_s)
        except (redis.RedisError, OSError) as error:
            self._lose(error)
            return []

    def end(self) -> None:
        """Hear nothing more, and keep the connection for the next to begin."""
        few = len(self._channels) <= _KEPT_CHANNELS
        self._channels = ()
        if few and self._asked and self._pubsub is not None:
            with contextlib.suppress(redis.RedisError, OSError):
                self._pubsub.unsubscribe()
                return
        self.close()

    def close(self) -> None:
        """Close the connection."""
        pubsub, self._pubsub, self._asked = self._pubsub, None, False
        if pubsub is not None:
            pubsub.close()

    def _hear(self, timeout_s: float) -> list[News] | None:
        if self._pubsub is None:
            early_s = self._next_s - time.monotonic()
            if early_s > 0:
                time.sleep(min(early_s, timeout_s))
                return []
            self._pubsub = self._client.pubsub()
        if not self._asked:
            # Before anything is sent: an attempt that fails must not pass for the good connection
            # before it, after which the first attempt comes at once.
            self._unconfirmed, self._pinged = set(self._channels), False
            self._begun_s = self._heard_s = time.monotonic()
            self._pubsub.subscribe(*self._channels)
            self._asked = True
        waited_for = bool(self._unconfirmed)
        messages = self._messages(timeout_s)
        self._note_silence(broken=bool(messages))
        self._unconfirmed -= {each["channel"] for each in messages if each["type"] == "subscribe"}
        if waited_for and not self._unconfirmed:
            return None
        return [News(e["channel"], e["data"]) for e in messages if e["type"] == "message"]

    def _messages(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return what comes in: after the first message only what is there already."""
        messages: list[dict[str, Any]] = []
        message = self._pubsub.get_message(timeout=timeout_s)
        while message is not None:
            messages.append(message)
            full = len(messages) >= _NEWS_AT_ONCE
            message = None if full else self._pubsub.get_message(timeout=0)
        return messages

    def _note_silence(self, *, broken: bool) -> None:
        """Ask a silent connection for a sign of life; raise when it gives none."""
        now = time.monotonic()
        if broken:
            self._heard_s, self._pinged = now, False
        elif now - self._heard_s >= _SILENT_S:
            if self._pinged:
                raise redis.ConnectionError("The subscription is silent.")
            self._pubsub.ping()
            self._heard_s, self._pinged = now, True

    def _lose(self, error: Exception) -> None:
        """Close what is left of the connection, and say when the next may be tried."""
        self.close()
        now = time.monotonic()
        shortest_s, longest_s = _PAUSE_S
        if not self._unconfirmed and now - self._begun_s >= _LASTED_S:
            self._pause_s = 0.0
        elif self._pause_s == shortest_s:
            logger.warning("subscription.lost", extra={"error": type(error).__name__})
        self._next_s = now + self._pause_s
        self._pause_s = min(max(2 * self._pause_s, shortest_s), longest_s)
