"""Hears every answer as it is told, and looks for those that nobody is left to read."""

from __future__ import annotations

import collections
import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import redis

from producer.contract import wire
from producer.contract.names import Keys
from tests.chaos.sender import text_of
from tests.support.servers import TestServer
from tests.support.waiting import wait_until

_KEYS: Final = Keys()
_RESULT: Final = _KEYS.result("")
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

    def __enter__(self) -> Witness:
        self.start()
        wait_until(lambda: self.began, what="the witness to listen")
        return self

    def __exit__(self, *_: object) -> None:
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
    ids = list(job_ids)
    found = dict.fromkeys(_there(client, _KEYS.fence, ids), "fenced")
    return found | {job: _word(value) for job, value in _there(client, _KEYS.result, ids).items()}


def stored_results(client: redis.Redis) -> tuple[dict[str, str], set[str]]:
    """Return every outcome that lies in Redis, as one word each; and which of them are fenced."""
    ids = [key.decode().removeprefix(_RESULT) for key in client.scan_iter(f"{_RESULT}*", 1000)]
    stored = {job: _word(value) for job, value in _there(client, _KEYS.result, ids).items()}
    return stored, set(_there(client, _KEYS.fence, ids))


def _there(
    client: redis.Redis, key_of: Callable[[str], str], ids: Sequence[str]
) -> dict[str, bytes]:
    """Return the values of the keys that exist, by job id."""
    there: dict[str, bytes] = {}
    for at in range(0, len(ids), _READ_AT_ONCE):
        chunk = ids[at : at + _READ_AT_ONCE]
        values: Any = client.mget([key_of(job_id) for job_id in chunk])
        pairs = zip(chunk, values, strict=True)
        there |= {job_id: value for job_id, value in pairs if value is not None}
    return there


def _word(payload: bytes) -> str:
    json_begins = payload[:1] in (b"{", b"[")
    meta: Any = json.loads(payload) if json_begins else wire.loads(payload)
    if meta["status"] == "SUCCESS":
        return text_of(meta["result"])
    return str(meta["result"].get("exc_type", meta["status"]))
