"""Waiting for results, as Celery's ``get()`` does it.

Redis tells of a result by publishing it; the keys are looked at beside that. So a lost message, a
cut connection, a server that restarts or stands still make a wait longer, and do not end it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import redis
from celery import states
from celery.exceptions import TimeoutError as CeleryTimeoutError
from kombu.exceptions import OperationalError

from producer.contract.patience import Patience
from producer.contract.settings import reading_options
from producer.contract.slow_reads import SlowReads
from producer.contract.subscription import Subscription

logger = logging.getLogger(__name__)

#: How often the keys are read, beside the subscription.
_LOOK_EVERY_S: Final = 1.0
#: So many subscriptions are kept for the next waits, each with its connection.
_KEPT: Final = 32
#: Results are read this many at a time.
_READ_AT_ONCE: Final = 256

#: What may be over at the next look: of Redis, and of the folder or bucket of large arrays.
_TROUBLE: Final = (redis.ConnectionError, redis.TimeoutError, OSError, OperationalError)


class Waiter:
    """Waits for results of one backend; threads may share it."""

    def __init__(self, backend: Any, standing: Callable[[], str]) -> None:
        #: ``standing`` tells what keeps jobs waiting, as workers say.
        self._backend, self._standing = backend, standing
        parameters = {**backend.connparams, **reading_options()}
        self._client: redis.Redis = backend._create_client(**parameters)
        self._idle: list[Subscription] = []
        self._pid = os.getpid()

    def wait(
        self,
        result: Any,
        patience: Patience,
        *,
        on_interval: Callable[[], Any] | None = None,
        on_message: Callable[[Any], Any] | None = None,
    ) -> Iterator[None]:
        """Settle ``result``, or each member of it; yield whenever something may have come.

        Raises Celery's TimeoutError when ``patience`` is over, and what Redis says when it refuses
        the credentials or the command.
        """
        awaited = _Awaited(self._backend, result, patience, on_message)
        trouble = self._look(awaited)
        if result.on_ready.ready:
            return
        with self._subscription() as subscription:
            subscription.begin(list(awaited.leaves))
            look_at = time.monotonic() + _LOOK_EVERY_S
            while not result.on_ready.ready:
                if not patience.left_s:
                    raise _timeout(awaited, patience, trouble, self._standing)
                step_s = max(0.0, look_at - time.monotonic())
                told = subscription.news(min(step_s, patience.left_s))
                # Where large arrays could not be read, the next look tries again.
                trouble = awaited.take_all((n.channel, n.data) for n in told or ()) or trouble
                if told is None or time.monotonic() >= look_at:
                    trouble = self._look(awaited)
                    _call(on_interval)
                    look_at = time.monotonic() + _LOOK_EVERY_S
                yield

    def close(self) -> None:
        """Close the connections that are not in use."""
        idle, self._idle = self._idle, []
        for subscription in idle:
            subscription.close()
        self._client.connection_pool.disconnect()

    def _look(self, awaited: _Awaited) -> Exception | None:
        """Read the keys of what is awaited; return why they could not be read."""
        keys = list(awaited.leaves)
        trouble: Exception | None = None
        try:
            for start in range(0, len(keys), _READ_AT_ONCE):
                chunk = keys[start : start + _READ_AT_ONCE]
                payloads: Any = self._client.mget(chunk)
                found = zip(chunk, payloads, strict=True)
                trouble = awaited.take_all(found) or trouble
        except redis.AuthenticationError:
            raise
        except _TROUBLE as error:
            trouble = error
        if trouble is not None:
            logger.info("results.unreachable", extra={"error": type(trouble).__name__})
        return trouble

    @contextlib.contextmanager
    def _subscription(self) -> Iterator[Subscription]:
        """Return a subscription for the length of the block, kept for the next wait."""
        if self._pid != os.getpid():
            # The parent's connections: a forked child must not write to them.
            self._idle, self._pid = [], os.getpid()
        try:
            subscription = self._idle.pop()
        except IndexError:
            subscription = Subscription(self._client)
        try:
            yield subscription
        except (Exception, GeneratorExit):
            raise
        except BaseException:
            # Maybe in the middle of a message: nobody may read what is left of it.
            subscription.close()
            raise
        finally:
            if len(self._idle) < _KEPT:
                subscription.end()
                self._idle.append(subscription)
            else:
                subscription.close()


class _Awaited:
    """The results that are still missing, by their keys."""

    def __init__(
        self, backend: Any, result: Any, patience: Patience, on_message: Callable[[Any], Any] | None
    ) -> None:
        self._backend, self._patience, self._on_message = backend, patience, on_message
        self._reads = SlowReads(backend.decode_result)
        self.leaves: dict[bytes, list[Any]] = {}
        for leaf in leaves_of(result):
            # Not leaf.ready(): that asks Redis.
            if not leaf._cache:
                self.leaves.setdefault(backend.get_key_for_task(leaf.id), []).append(leaf)

    def take_all(self, found: Iterable[tuple[bytes, bytes | None]]) -> Exception | None:
        """Settle what was found; return why something of it could not be read."""
        trouble: Exception | None = None
        wait_until_s = time.monotonic() + min(_LOOK_EVERY_S, self._patience.left_s)
        for key, payload in found:
            if payload is None or key not in self.leaves:
                continue
            try:
                self._take(key, payload, max(0.0, wait_until_s - time.monotonic()))
            except redis.AuthenticationError:
                raise
            except _TROUBLE as error:
                trouble = error
        return trouble

    def _take(self, key: bytes, payload: bytes, wait_s: float) -> None:
        """Settle the results under ``key``, when ``payload`` is final."""
        meta = self._reads.decoded(key, payload, wait_s)
        if self._on_message is not None:
            self._on_message(meta)
        if meta["status"] not in states.READY_STATES:
            return
        self._patience.renew()
        for leaf in self.leaves.pop(key):
            leaf._maybe_set_cache(meta)
            # Where Celery collects the members of a group in the order they come.
            bucket = self._backend.result_consumer.buckets.pop(leaf, None)
            if bucket is not None:
                bucket.append(leaf)


def leaves_of(result: Any) -> Iterator[Any]:
    """Yield ``result`` itself, or the results of single tasks in a group."""
    members = getattr(result, "results", None)
    if members is None:
        yield result
        return
    for member in members:
        yield from leaves_of(member)


def _call(on_interval: Callable[[], Any] | None) -> None:
    """Call what the caller of ``get()`` wants called, which may ask Redis about parents."""
    if on_interval is not None:
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            on_interval()


def _timeout(
    awaited: _Awaited,
    patience: Patience,
    trouble: Exception | None,
    standing: Callable[[], str],
) -> CeleryTimeoutError:
    missing = len(awaited.leaves)
    what, jobs = f"{missing} results are", "Their jobs wait, run, or are"
    if missing == 1:
        what, jobs = "The result is", "Its job waits, runs, or is"
    why = f"{jobs} lost with a Redis that was emptied: `fleet queue` says what waits. "
    if isinstance(trouble, OperationalError):
        why = f"{trouble} "
    elif trouble is not None:
        why = f"Redis cannot be reached: {str(trouble).rstrip('.')}. "
    elif patience.was_long:
        why = f"{standing()}{why}"
    return CeleryTimeoutError(
        f"{what} not there after {patience}. {why}"
        "Get again, or give it longer: get(timeout=math.inf) waits for ever."
    )
