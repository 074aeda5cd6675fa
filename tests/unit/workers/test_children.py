"""What a signal means for a command."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from workers.children import Ended, ended_by_signals


def test_a_signal_ends_a_command_whatever_error_a_library_makes_of_it() -> None:
    def initialize() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            raise ImportError("initialization failed") from error

    with pytest.raises(Ended) as ended, ended_by_signals():
        initialize()

    assert ended.value.signum == signal.SIGTERM


class Dropped:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        # Handlers run between two steps of Python.
        [None for _ in range(100)]


def test_a_signal_that_comes_while_a_finalizer_runs_ends_a_command_when_that_is_over() -> None:
    def drop_and_go_on() -> None:
        Dropped()
        time.sleep(5)

    with pytest.raises(Ended) as ended, ended_by_signals():
        drop_and_go_on()

    assert ended.value.signum == signal.SIGTERM


def test_an_error_of_a_command_that_nobody_ended_stays_what_it_is() -> None:
    with pytest.raises(ImportError), ended_by_signals():
        raise ImportError("no such library")


def test_a_signal_that_comes_too_late_ends_nothing() -> None:
    with ended_by_signals() as too_late:
        too_late()
        os.kill(os.getpid(), signal.SIGTERM)


def test_signals_mean_afterwards_what_they_meant_before() -> None:
    before = signal.getsignal(signal.SIGTERM)

    with contextlib.suppress(Ended), ended_by_signals():
        os.kill(os.getpid(), signal.SIGTERM)

    assert signal.getsignal(signal.SIGTERM) is before
