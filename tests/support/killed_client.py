"""A client to be killed: it waits in every way for jobs of the model ``scripted``, and says so.

``python -m tests.support.killed_client JOBS``
"""

from __future__ import annotations

import asyncio
import sys
import threading

from producer.client import Client
from producer.contract.app import make_app
from producer.tasks import register
from tests.support.engines import Do, row

_MODEL = "scripted"


def main(count: int) -> None:
    client, infer = Client(), register(make_app())
    slow = {"x": row(Do.SLEEP, 2)}
    jobs = client.submit_many(_MODEL, ({"x": row(job=n)} for n in range(1, count + 1)))
    awaited = client.submit(_MODEL, slow)
    client.submit(_MODEL, slow).cancel()

    async def ask() -> None:
        await awaited

    for wait in (infer.delay(_MODEL, slow).get, lambda: asyncio.run(ask())):
        threading.Thread(target=wait).start()
    for job in client.as_completed(jobs):
        print(f"answered {job.id}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
