"""What ten thousand jobs leave behind in the memory of an app, in a process of its own:
``python -m tests.support.memory_of_jobs`` prints it as JSON.

Whatever else lives in the tests' own process takes memory when it likes: the first traceback that
is written there costs as much as is allowed here, for the lines of the libraries that it shows.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from celery import states

from producer.client import Client, Job
from producer.contract.app import make_app
from producer.contract.names import Keys
from producer.contract.settings import Settings, redis_client

KEYS: Final = Keys()
JOBS: Final = 10_000
#: Fewer than one for ten of the jobs that were meanwhile.
FEW: Final = 2000
#: How long what is left may take to be gone.
_PATIENCE_S: Final = 20.0


def main() -> Mapping[str, Any]:
    """Send and answer so many jobs three times; return what the last two rounds left."""
    settings = Settings.from_env()
    app = make_app(settings)
    answer = app.backend.encode({"status": states.SUCCESS, "result": 1, "fleet": {}})
    with Client(settings) as fleet, redis_client(settings.broker_url) as redis:
        _round_trip(fleet, redis.pipeline(transaction=False), answer)
        _wait_idle(fleet)
        first = _blocks()
        for _ in range(2):
            _round_trip(fleet, redis.pipeline(transaction=False), answer)
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            more, left = _blocks() - first, _jobs_of(fleet)
            if (more < FEW and not left) or time.monotonic() > until_s:
                return {"blocks": more, "jobs": left}


def _round_trip(fleet: Client, pipe: Any, answer: Any) -> None:
    jobs = fleet.submit_many("other", ({"i": i} for i in range(JOBS)))
    for start in range(0, len(jobs), 1000):
        part = [job.id for job in jobs[start : start + 1000]]
        for job_id in part:
            pipe.set(KEYS.result(job_id), answer, ex=60)
        pipe.publish(KEYS.replies(fleet.id), ",".join(part))
        pipe.execute()
    assert sum(1 for _ in fleet.as_completed(jobs, timeout_s=60)) == JOBS


def _wait_idle(fleet: Client) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while fleet._room.inbox._awaited:
        assert time.monotonic() < until_s, "jobs are awaited that nobody holds"
        time.sleep(0.02)


def _blocks() -> int:
    # The least of a moment: the thread that settled the last job may still be in its look.
    least = sys.maxsize
    for _ in range(4):
        time.sleep(0.2)
        gc.collect()
        least = min(least, sys.getallocatedblocks())
    return least


def _jobs_of(fleet: Client) -> int:
    return sum(type(each) is Job and each.sender is fleet for each in gc.get_objects())


if __name__ == "__main__":
    print(json.dumps(main()))
