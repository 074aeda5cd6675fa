"""An app that waits for replies in every way there is, until it is killed."""

from __future__ import annotations

import asyncio
import threading
import time

from producer.client import Client
from producer.tasks import infer
from tests.support.engines import Do, row

MODEL = "scripted"
#: Nobody answers while this is looked at.
LATER = {"x": row(Do.SLEEP, 600)}


async def waits(client: Client) -> None:
    await asyncio.gather(client.infer(MODEL, LATER, timeout_s=600), client.submit(MODEL, LATER))


def main() -> None:
    client = Client()
    jobs = client.submit_many(MODEL, (LATER for _ in range(3)))
    sent = infer.delay(MODEL, LATER)
    for wait in (
        lambda: jobs[0].reply(600),
        lambda: list(client.as_completed(jobs, timeout_s=600)),
        lambda: sent.get(timeout=600),
        lambda: asyncio.run(waits(client)),
    ):
        threading.Thread(target=wait, daemon=True).start()
    print("waiting", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
