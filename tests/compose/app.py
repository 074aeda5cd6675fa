"""The app's part of the run under Docker; `tests.compose.run` starts it in a container.

    python -m tests.compose.app send 2000       send so many jobs
    python -m tests.compose.app collect 2000    wait for their answers; print what was found as JSON

Both know the jobs by their ids, so that nothing in between depends on one process.
"""

from __future__ import annotations

import collections
import json
import sys
from typing import Any, Final

import numpy as np

from producer.client import Client
from producer.contract.errors import FleetError
from producer.contract.names import Keys, queue_of
from producer.contract.settings import Settings, redis_client
from tests.support.engines import row

MODEL: Final = "slow"

_COLLECT_WITHIN_S: Final = 240.0


def main() -> None:
    """Do what the command line says."""
    what, count = sys.argv[1], int(sys.argv[2])
    numbers = {f"compose-{number}": number for number in range(1, count + 1)}
    if what == "send":
        client = Client()
        for job_id, number in numbers.items():
            client.submit(MODEL, {"x": row(job=number)}, job_id=job_id)
    else:
        print(json.dumps({**_collect(numbers), **_left()}))


def _collect(numbers: dict[str, int]) -> dict[str, Any]:
    answers: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    for job in Client().as_completed(list(numbers), timeout_s=_COLLECT_WITHIN_S):
        answers[job.id] += 1
        try:
            outputs = job.reply().outputs
        except FleetError as error:
            wrong.append(f"{job.id}: {error}")
            continue
        if not np.array_equal(outputs["y"], 2 * row(job=numbers[job.id])):
            wrong.append(f"{job.id}: the answer belongs to another job")
    return {
        "answered": len(answers),
        "answered_twice": sum(times > 1 for times in answers.values()),
        "wrong": wrong,
    }


def _left() -> dict[str, int]:
    """Return what is still in Redis of the jobs."""
    keys, queue = Keys(), queue_of(MODEL)
    with redis_client(Settings.from_env().broker_url) as client:
        return {
            "left_in_queue": sum(client.xlen(stream) for stream in keys.streams(queue)),
            "left_begun": client.hlen(keys.journal(queue)),
            "dead_letters": client.xlen(keys.dead(queue)),
        }


if __name__ == "__main__":
    main()
