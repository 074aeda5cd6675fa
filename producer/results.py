"""Results of the fleet, read and deleted many at a time.

What was read is deleted and leaves a fence, so that the same job id is not run again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import redis
from kombu.exceptions import OperationalError

from producer.contract.app import FleetApp
from producer.contract.blobs import Named, named_in
from producer.contract.errors import BadMessage
from producer.contract.names import Keys
from producer.contract.settings import reading_options, redis_client
from producer.contract.subscription import Subscription
from producer.replies import answered_before, read_meta

logger = logging.getLogger(__name__)

#: Results are read this many at a time.
READ_AT_ONCE: Final = 256

#: A job that waits longer may have an id that was answered before: its fence is looked for as well.
FENCE_AFTER_S: Final = 1.0

#: Deletes results and leaves fences; the deletion first, because a full Redis then allows the rest.
#: A result that is gone by now leaves none: its job was requeued, and a fence would end it.
#: KEYS: the results, then their fences. ARGV: how long a fence lives.
_FORGET: Final = """
local half = #KEYS / 2
for i = 1, half do
    if redis.call('DEL', KEYS[i]) == 1 then
        redis.call('SET', KEYS[half + i], '1', 'EX', ARGV[1])
    end
end
"""


class Found(NamedTuple):
    """What a look found out about one job."""

    job_id: str
    #: The decoded result; an error when it cannot be decoded, or was read before.
    meta: dict[str, Any] | BaseException
    #: Whether there is a result to be forgotten.
    stored: bool
    #: Its large arrays.
    named: tuple[Named, ...] = ()
    #: Why it cannot be read at the moment; it is to be read again.
    held_up: Exception | None = None


class Results:
    """Reads and deletes results of the fleet, many at a time."""

    def __init__(self, app: FleetApp) -> None:
        settings = app.settings
        self._backend = app.backend
        self._keys = Keys(prefix=settings.prefix)
        self._fence_ttl_s = settings.fence_ttl_s
        options = reading_options()
        self._results = redis_client(settings.result_url, **options)
        self._broker = None if settings.one_server else redis_client(settings.broker_url, **options)

    def read(
        self, job_ids: Iterable[str], *, overdue: Collection[str] = frozenset()
    ) -> Iterator[Found]:
        """Yield what is there; of the ``overdue``, also that only a fence is there."""
        remaining = iter(job_ids)
        while chunk := list(islice(remaining, READ_AT_ONCE)):
            late = [job_id for job_id in chunk if job_id in overdue]
            payloads, fences = self._fetch(chunk, late)
            fenced = {job_id for job_id, fence in zip(late, fences, strict=True) if fence}
            for job_id, payload in zip(chunk, payloads, strict=True):
                meta = self._decoded(payload) if payload is not None else None
                if isinstance(meta, OperationalError):
                    yield Found(job_id, {}, stored=False, held_up=meta)
                elif meta is not None:
                    yield Found(job_id, meta, stored=True, named=named_in(payload))
                elif payload is None and job_id in fenced:
                    yield Found(job_id, answered_before(job_id), stored=False)

    def _fetch(
        self, job_ids: Sequence[str], late: Sequence[str]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the results of ``job_ids`` and the fences of ``late``; one trip to each server."""
        results = [self._keys.result(job_id) for job_id in job_ids]
        fences = [self._keys.fence(job_id) for job_id in late]
        if self._broker is None:
            values: Any = self._results.mget([*results, *fences])
            return values[: len(results)], values[len(results) :]
        # The fences first: a worker stores the result before the fence of a job it completes, so
        # whoever sees a fence then finds the result, unless it was read and deleted.
        fenced: Any = self._broker.mget(fences) if fences else ()
        values = self._results.mget(results)
        return values, fenced

    def _decoded(self, payload: bytes) -> dict[str, Any] | BaseException | None:
        try:
            return read_meta(self._backend, payload)
        except redis.RedisError:
            # Of its large arrays: they are read in another trip.
            raise
        except OperationalError as error:
            # Their folder or bucket failed: the result stays, and the next look tries again.
            logger.warning("results.unreadable", extra={"error": str(error)})
            trouble: Exception = error
            return trouble
        except Exception as error:  # noqa: BLE001  one bad result must not hide the others
            return BadMessage(f"The result cannot be read: {error}")

    def forget(self, read: Sequence[Found]) -> None:
        """Delete results that were read, and fence their ids."""
        for start in range(0, len(read), READ_AT_ONCE):
            chunk = read[start : start + READ_AT_ONCE]
            results = [self._keys.result(found.job_id) for found in chunk]
            fences = [self._keys.fence(found.job_id) for found in chunk]
            self._delete(results, fences)
            # After the results: whoever finds one finds its arrays.
            self._backend.blobs.remove(
                self._results, [named for found in chunk for named in found.named]
            )

    def discard(self, job_ids: Sequence[str]) -> None:
        """Delete results that nobody will read, and fence their ids."""
        for start in range(0, len(job_ids), READ_AT_ONCE):
            chunk = job_ids[start : start + READ_AT_ONCE]
            payloads, _ = self._fetch(chunk, ())
            self.forget(
                [
                    Found(job_id, {}, stored=True, named=named_in(payload) if payload else ())
                    for job_id, payload in zip(chunk, payloads, strict=True)
                ]
            )

    def _delete(self, results: Sequence[str], fences: Sequence[str]) -> None:
        if self._broker is None:
            keys = [*results, *fences]
            self._results.eval(_FORGET, len(keys), *keys, str(self._fence_ttl_s))
            return
        with self._broker.pipeline(transaction=False) as pipe:
            for fence in fences:
                pipe.set(fence, "1", ex=self._fence_ttl_s)
            pipe.execute()
        self._results.delete(*results)

    def subscription(self) -> Subscription:
        """Return an unused subscription on the server that workers publish replies on."""
        return Subscription(self._broker or self._results)

    def close(self) -> None:
        """Close the connections; a later look opens them again."""
        for client in filter(None, (self._results, self._broker)):
            client.close()
