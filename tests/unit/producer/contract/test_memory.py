"""How full a server is, from its own words."""

from __future__ import annotations

import redis

from producer.contract.memory import Memory, read_memory, too_full

INFO = (
    b"# Memory\r\nused_memory:1000\r\nused_memory_human:1000B\r\nused_memory_peak:5000\r\n"
    b"maxmemory:2000\r\nmaxmemory_human:2.00K\r\nmem_not_counted_for_evict:300\r\n"
)


def test_what_the_server_does_not_count_is_not_counted() -> None:
    assert read_memory(INFO) == Memory(used_bytes=700, max_bytes=2000)


def test_an_answer_that_leaves_it_out_says_nothing() -> None:
    assert read_memory(redis.ResponseError("NOPERM")) is None
    assert read_memory(b"# Memory\r\nused_memory:1000\r\n") is None
    assert read_memory(b"") is None


def test_it_is_too_full_above_the_watermark_and_never_without_a_limit() -> None:
    assert not Memory(used_bytes=90, max_bytes=100).is_above(0.9)
    assert Memory(used_bytes=91, max_bytes=100).is_above(0.9)
    assert not Memory(used_bytes=1 << 40, max_bytes=0).is_above(0.9)


def test_the_error_says_how_full_it_is_and_what_to_do() -> None:
    text = str(too_full(Memory(used_bytes=95_000, max_bytes=100_000), 0.9))

    assert "95%" in text
    assert "100,000 bytes" in text
    assert "FLEET_MEMORY_WATERMARK" in text
    assert "Send again later" in text
