"""Results whose large arrays lie in a store that does not answer."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from kombu.exceptions import OperationalError

from producer.contract.blobs import Blobs
from producer.contract.settings import Settings
from producer.contract.slow_reads import SlowReads

PAYLOAD = Blobs.of(Settings(blob_url="file:///arrays")).pack(np.zeros(100_000, np.uint8)).body
MANY = 1000


def test_a_store_that_does_not_answer_costs_a_wait_for_many_no_thread_each() -> None:
    answers = threading.Event()
    reads = SlowReads(lambda _: answers.wait(20))
    before = set(threading.enumerate())
    keys = [str(number).encode() for number in range(MANY)]

    for key in keys:
        with pytest.raises(OperationalError, match="does not answer"):
            reads.decoded(key, PAYLOAD, 0)

    # Threads of tests before may end meanwhile.
    assert 1 < len(set(threading.enumerate()) - before) < MANY / 2
    answers.set()
    assert all(reads.decoded(key, PAYLOAD, 10) for key in keys)
