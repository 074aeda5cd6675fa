"""Results whose large arrays lie in a folder or bucket, read in a thread: such a read has no end
of its own, and whoever waits for a result has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final

from kombu.exceptions import OperationalError

from producer.contract import wire
from producer.contract.blobs import named_in
from producer.contract.wire import Where

_WITH_REFERENCES: Final = bytes([wire.VERSION_WITH_REFERENCES])


#: So many are under way at once: a thread each, and where nothing answers they stay.
_AT_ONCE: Final = 256


class SlowReads:
    """The reads of somebody who waits; one that has begun is asked for again."""

    def __init__(self, decode: Callable[[bytes], Any]) -> None:
        self._decode = decode
        self._begun: dict[bytes, Future[Any]] = {}

    def decoded(self, key: bytes, payload: bytes, wait_s: float) -> Any:
        """Return the result under ``key``, decoded; raises OperationalError as long as its arrays
        cannot be read, or are not there after ``wait_s``.
        """
        if not _in_store(payload):
            return self._decode(payload)
        reading = self._begun.get(key)
        if reading is None:
            if len(self._begun) >= _AT_ONCE:
                raise _silent()
            reading = self._begun[key] = Future()
            threading.Thread(target=self._run, args=(reading, payload), daemon=True).start()
        wait([reading], wait_s)
        if not reading.done():
            raise _silent()
        del self._begun[key]
        return reading.result()

    def _run(self, reading: Future[Any], payload: bytes) -> None:
        try:
            reading.set_result(self._decode(payload))
        except BaseException as error:  # noqa: BLE001  it is told to who waits
            reading.set_exception(error)


def _silent() -> OperationalError:
    return OperationalError(
        "The folder or bucket of large arrays (FLEET_BLOB_URL) does not answer."
    )


def _in_store(payload: bytes) -> bool:
    if payload[:1] != _WITH_REFERENCES:
        return False
    return any(named.where is Where.STORE for named in named_in(payload))
