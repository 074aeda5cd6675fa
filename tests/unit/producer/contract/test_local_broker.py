"""The note of a running `fleet up`: found while it runs, counted for nothing afterwards."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from producer.contract import local_broker
from producer.contract.errors import ConfigError
from producer.contract.local_broker import local_broker_url, noting
from tests.support.waiting import wait_until

URL = "redis://:secret@127.0.0.1:4000/0"


@contextlib.contextmanager
def noted(url: str, note: Path) -> Iterator[None]:
    with noting(note) as write:
        write(url)
        yield


@pytest.fixture
def note(tmp_path: Path) -> Path:
    return tmp_path / ".fleet" / "broker-url"


def test_the_url_is_found_while_the_note_is_held_and_gone_afterwards(note: Path) -> None:
    with noted(URL, note):
        assert local_broker_url(note) == URL

    assert local_broker_url(note) is None
    assert not note.parent.exists()


def test_the_text_of_one_that_lasts_stays_for_apps_and_counts_for_nothing(note: Path) -> None:
    with noting(note) as write:
        write(URL, lasting=True)

    assert note.read_text(encoding="utf-8") == URL
    assert local_broker_url(note) is None
    with noting(note):
        assert local_broker_url(note) is None
    with noted("redis://another", note):
        assert local_broker_url(note) == "redis://another"
    assert note.read_text(encoding="utf-8") == URL


def test_only_its_owner_may_read_the_note(note: Path) -> None:
    with noted(URL, note):
        assert stat.S_IMODE(note.stat().st_mode) == 0o600


def test_a_note_that_nobody_holds_counts_for_nothing(note: Path) -> None:
    note.parent.mkdir()
    note.write_text(URL, encoding="utf-8")

    assert local_broker_url(note) is None


def test_what_a_killed_command_left_is_replaced(note: Path) -> None:
    note.parent.mkdir()
    note.write_text(URL + "/a-longer-one", encoding="utf-8")

    with noted(URL, note):
        assert local_broker_url(note) == URL


def test_a_second_command_in_the_same_clone_is_refused(note: Path) -> None:
    with (
        noted(URL, note),
        pytest.raises(ConfigError, match="already runs"),
        noted("redis://other", note),
    ):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="finds open files in /proc")
def test_one_that_waited_for_another_to_end_holds_the_folder(
    note: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_broker, "_TRIES", 1000)
    entered, done = threading.Event(), threading.Event()

    def wait_and_hold() -> None:
        with noted("redis://second", note):
            entered.set()
            done.wait(30)

    second = threading.Thread(target=wait_and_hold)
    with noted(URL, note):
        second.start()
        wait_until(lambda: times_open(note) == 2, what="the second one to have opened the note")
    try:
        assert entered.wait(30)
        monkeypatch.undo()

        with pytest.raises(ConfigError, match="already runs"), noted("redis://third", note):
            pass
        assert local_broker_url(note) == "redis://second"
    finally:
        done.set()
        second.join()


def times_open(path: Path) -> int:
    """Return how often this process has the file open."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.path.samestat(each.stat(), path.stat())
    return found


def test_the_refused_one_leaves_the_note_of_the_first(note: Path) -> None:
    with noted(URL, note):
        with pytest.raises(ConfigError), noted("redis://other", note):
            pass

        assert local_broker_url(note) == URL


def test_before_the_url_is_written_there_is_none(note: Path) -> None:
    with noting(note):
        assert local_broker_url(note) is None
