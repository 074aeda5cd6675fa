"""Hears every answer as it is told, and looks for those that nobody is left to read."""

from __future__ import annotations

import collections
import contextlib
import json
import threading
from collections.abc import Iterable
from typing import Any, Final

import redis

from producer.contract import wire
from producer.contract.names import Keys
from tests.chaos.sender import text_of
from tests.support.servers import TestServer

_RESULT: Final = Keys().result("")
_READ_AT_ONCE: Final = 500
_RECONNECT_S: Final = 0.1


class Witness(threading.Thread):
    """Counts the answers that are published, by job. It may miss some, and must not hear two."""

    def __init__(self, server: TestServer) -> None:
        super().__init__(name="witness", daemon=True)
        self.told: collections.Counter[str] = collections.Counter()
        #: How often it had to begin anew.
        self.began = 0
        self._server = server
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(redis.RedisError, OSError):
                self._listen()
            self._stopping.wait(_RECONNECT_S)

    def stop(self) -> None:
        self._stopping.set()
        self.join(timeout=10)

    def _listen(self) -> None:
        with self._server.client() as client, client.pubsub() as subscription:
            subscription.psubscribe(f"{_RESULT}*")
            self.began += 1
            while not self._stopping.is_set():
                message = subscription.get_message(timeout=0.5)
                if message is not None and message["type"] == "pmessage":
                    self.told[message["channel"].decode().removeprefix(_RESULT)] += 1


def read_results(client: redis.Redis, job_ids: Iterable[str]) -> dict[str, str]:
    """Return the outcomes that lie in Redis, as one word each; ``fenced`` for one that was read."""
    found: dict[str, str] = {}
    ids, keys = list(job_ids), Keys()
    for at in range(0, len(ids), _READ_AT_ONCE):
        chunk = ids[at : at + _READ_AT_ONCE]
        values: Any = client.mget(
            [f(job_id) for f in (keys.result, keys.fence) for job_id in chunk]
        )
        for job_id, payload, fence in zip(chunk, values, values[len(chunk) :], strict=False):
            if payload is not None:
                found[job_id] = _word(payload)
            elif fence is not None:
                found[job_id] = "fenced"
    return found


def stored_results(client: redis.Redis) -> dict[str, str]:
    """Return every outcome that lies in Redis, as one word each."""
    ids = [key.decode().removeprefix(_RESULT) for key in client.scan_iter(f"{_RESULT}*", 1000)]
    found = read_results(client, ids)
    return {job_id: text for job_id, text in found.items() if text != "fenced"}


def _word(payload: bytes) -> str:
    json_begins = payload[:1] in (b"{", b"[")
    meta: Any = json.loads(payload) if json_begins else wire.loads(payload)
    if meta["status"] == "SUCCESS":
        return text_of(meta["result"])
    return str(meta["result"].get("exc_type", meta["status"]))
