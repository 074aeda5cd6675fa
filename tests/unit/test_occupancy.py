"""The tests' own witness of who lived on which instance: it must be able to find an overlap."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.occupancy import Occupancy
from tests.support.waiting import wait_until


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def begins(log: Path, pid: int, instance: str) -> None:
    with log.open("a") as file:
        file.write(f"load {pid} fp32 {instance} {time.time():.6f}\n")


def test_a_process_that_begins_beside_a_living_one_is_found(
    processes: list[subprocess.Popen[bytes]], log: Path
) -> None:
    one, two = processes
    with Occupancy(log) as occupancy:
        begins(log, one.pid, "CPU/0")
        begins(log, two.pid, "CPU/0")
        wait_until(lambda: len(occupancy.stays) == 2, what="both to be seen")

        ((earlier, later),) = occupancy.overlaps()

    assert (earlier.pid, later.pid) == (one.pid, two.pid)


def test_one_that_begins_after_the_other_was_killed_is_none(
    processes: list[subprocess.Popen[bytes]], log: Path
) -> None:
    one, two = processes
    with Occupancy(log) as occupancy:
        begins(log, one.pid, "CPU/0")
        wait_until(lambda: occupancy.stays, what="the first to be seen")
        one.kill()
        one.wait()
        wait_until(lambda: occupancy.stays[0].ended, what="its end to be seen")
        begins(log, two.pid, "CPU/0")
        wait_until(lambda: len(occupancy.stays) == 2, what="both to be seen")

    assert occupancy.overlaps() == []


def test_an_end_that_is_seen_late_is_no_overlap(
    processes: list[subprocess.Popen[bytes]], log: Path
) -> None:
    one, two = processes
    with Occupancy(log) as occupancy:
        begins(log, one.pid, "CPU/0")
        wait_until(lambda: occupancy.stays, what="the first to be seen")
        # Both between two looks.
        one.kill()
        one.wait()
        begins(log, two.pid, "CPU/0")
        wait_until(lambda: len(occupancy.stays) == 2, what="both to be seen")

    assert occupancy.overlaps() == []


def test_two_instances_are_none_of_each_others_business(
    processes: list[subprocess.Popen[bytes]], log: Path
) -> None:
    with Occupancy(log) as occupancy:
        for number, process in enumerate(processes):
            begins(log, process.pid, f"CPU/{number}")
        wait_until(lambda: len(occupancy.stays) == 2, what="both to be seen")

    assert occupancy.overlaps() == []


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "starts.log"
