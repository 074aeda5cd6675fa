"""The large arrays of an instance's jobs and replies: read with a claim, written before a reply,
and gone with the job. Those in Redis are deleted by the scripts that end jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import redis

from producer.contract.blobs import Blobs, Spilled
from producer.contract.wire import Where
from workers.delivery.ledger import Entry, Ledger
from workers.delivery.scripts import send


class LargeArrays:
    """Those of one consumer."""

    def __init__(
        self, blobs: Blobs, ledger: Ledger, *, client: redis.Redis, results: redis.Redis | None
    ) -> None:
        #: ``results`` is None when broker and results are one database.
        self._blobs, self._ledger = blobs, ledger
        self._client, self._results = client, results or client

    def read(self, entries: Iterable[Entry]) -> Mapping[str, bytes | None]:
        """Return the arrays of what was claimed, by id; None for one that is gone."""
        return self._blobs.read(self._client, [entry.named for entry in entries if entry.blobs])

    def keep(self, replies: Sequence[Spilled]) -> None:
        """Write the arrays of replies where their readers will look; again changes nothing."""
        ttl_s = self._blobs.output_ttl_s(self._ledger.result_ttl_s)
        in_redis: dict[str, bytes | memoryview] = {}
        for reply in replies:
            if reply.named.where is Where.STORE and reply.blobs:
                self._blobs.store.write(reply.blobs)
            else:
                in_redis |= reply.blobs
        if in_redis:
            calls = [self._ledger.keep(*blob, ttl_s=ttl_s) for blob in in_redis.items()]
            send(self._results, *calls)

    def remove(self, entries: Iterable[Entry]) -> None:
        """Delete the files of jobs that have ended; what is in Redis went with their end.

        What a dead letter needs was sent twice, and stays.
        """
        named = [entry.named for entry in entries if entry.named.where is Where.STORE]
        if ids := [blob_id for each in named for blob_id in each.ids]:
            kept: Any = self._client.mget(map(self._ledger.keys.kept_blob, ids))
            marked = {blob_id for blob_id, mark in zip(ids, kept, strict=True) if mark}
            self._blobs.remove_files(each for each in named if marked.isdisjoint(each.ids))
