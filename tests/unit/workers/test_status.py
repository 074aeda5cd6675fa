"""What an instance tells its parent."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest

from workers.status import Lap, Reporter, State, Status


def said(status: Status) -> dict[str, object]:
    line = status.line()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return dict(json.loads(line))


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)
    os.close(write_fd)


def test_a_new_instance_is_starting_and_has_done_nothing() -> None:
    line = said(Status())

    assert line["state"] == "starting"
    assert (line["running"], line["loads"], line["counters"], line["batch_s"]) == (0, 0, {}, 0)


def test_times_are_told_as_ages() -> None:
    status, before_s = Status(), time.monotonic()
    status.batch_begins(["stream 1-0"], model="digits", limit_s=60)
    time.sleep(0.1)
    status.tick_s = time.monotonic() - 2

    line = json.loads(status.line())
    # A busy machine may have taken its time.
    at_most_s = time.monotonic() - before_s

    assert 0.1 <= line["batch_s"] <= at_most_s + 0.01
    assert line["batch_limit_s"] == 60
    assert 2 <= line["silent_s"] <= 2 + at_most_s


def test_of_several_batches_the_one_that_is_nearest_to_its_limit_is_told() -> None:
    status = Status()
    status.batch_begins(["stream 1-0", "stream 2-0"], model="digits", limit_s=60)
    near = status.batch_begins(["stream 3-0"], model="mlp", limit_s=5)

    line = said(status)
    assert (line["running"], line["batch_limit_s"], line["alone"]) == (3, 5, "stream 3-0")
    assert line["batch_model"] == "mlp"

    status.batch_ends(near)
    line = said(status)
    assert (line["running"], line["batch_limit_s"], line["alone"]) == (2, 60, "")


def test_the_clock_of_a_batch_stands_while_it_waits_for_another() -> None:
    lap = Lap(places=("stream 1-0",), model="digits", limit_s=5, began_s=time.monotonic() - 3)
    lap.stop()
    assert lap.ran_s(time.monotonic() + 100) == pytest.approx(3, abs=0.5)

    lap.stands_since_s = time.monotonic() - 2
    lap.go()

    assert lap.ran_s(time.monotonic()) == pytest.approx(1, abs=0.5)


def test_counters_are_told_by_model_with_every_reason_to_close() -> None:
    status = Status()
    status.counters["digits"].jobs += 3

    counters = said(status)["counters"]

    assert isinstance(counters, dict)
    assert counters["digits"]["jobs"] == 3
    assert set(counters["digits"]["closed"]) == {"full", "empty", "delay", "bytes", "alone"}


def test_a_state_that_stays_keeps_its_age_and_takes_the_new_text() -> None:
    status = Status()
    status.become(State.BROKEN, "first")
    since_s = status.since_s

    status.become(State.BROKEN, "second")

    assert (status.since_s, status.text) == (since_s, "second")


def test_a_sign_of_life_comes_with_every_change_of_state() -> None:
    status = Status()
    status.tick_s -= 100

    status.become(State.READY)

    assert said(status)["silent_s"] == pytest.approx(0, abs=0.5)


def test_news_is_told_at_once_and_otherwise_once_a_second(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    reporter = Reporter(Status(), write_fd)

    reporter.send()
    reporter.send()

    lines = os.read(read_fd, 65536).splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["starting", "starting"]
