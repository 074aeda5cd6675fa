"""Every way to wait for replies, each in a thread, and results that come when a test says so."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import types
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import redis
from celery import states
from celery.result import GroupResult

from producer.client import Client
from producer.contract.app import FleetApp, make_app
from producer.contract.names import Keys
from producer.contract.settings import Settings
from producer.tasks import register
from tests.support.pace import TURN_S, Pace

#: How many jobs each way waits for.
COUNTS: Final = {
    "get": 1,
    "group": 20,
    "reply": 1,
    "await": 20,
    "as_completed": 1000,
    "as_completed of results": 100,
}

#: A model that nobody serves.
_MODEL: Final = "nobody"


class Wait(threading.Thread):
    """One way of waiting; what it gets are the numbers of its jobs."""

    def __init__(self, way: str, settings: Settings, timeout_s: float) -> None:
        super().__init__(name=way, daemon=True)
        self.way, self._timeout_s = way, timeout_s
        self.ids = [f"{way}-{uuid.uuid4().hex}" for _ in range(COUNTS[way])]
        self.client = Client(settings)
        self.app = make_app(settings)
        self.got: list[Any] = []
        self.error: BaseException | None = None
        #: The longest time that the event loop of an `await` stood still while others went on.
        self.lag_s = 0.0
        self._jobs: list[Any] = []
        if way in ("reply", "await", "as_completed"):
            inputs = ({"i": number} for number in range(len(self.ids)))
            self._jobs = self.client.submit_many(_MODEL, inputs, job_ids=self.ids)
        else:
            infer = register(self.app)
            self._jobs = [infer.AsyncResult(job_id) for job_id in self.ids]

    def run(self) -> None:
        try:
            self.got = sorted(self._wait())
        except BaseException as error:  # noqa: BLE001  the test asks for it
            self.error = error

    def close(self) -> None:
        self.client.close()
        self.app.backend.waiter.close()
        self.app.close()

    def _wait(self) -> list[int]:
        match self.way:
            case "get":
                (result,) = self._jobs
                return [result.get(timeout=self._timeout_s)["i"]]
            case "group":
                group = GroupResult(uuid.uuid4().hex, self._jobs, app=self.app)
                return [answer["i"] for answer in group.get(timeout=self._timeout_s)]
            case "reply":
                (job,) = self._jobs
                return [job.reply(self._timeout_s).outputs["i"]]
            case "await":
                return asyncio.run(self._await())
            case _:
                done = self.client.as_completed(self._jobs, timeout_s=self._timeout_s)
                return [job.reply(0).outputs["i"] for job in done]

    async def _await(self) -> list[int]:
        with Pace() as pace:
            watch = asyncio.create_task(self._watch_lag(pace))
            async with asyncio.timeout(self._timeout_s):
                replies = await asyncio.gather(*self._jobs)
            watch.cancel()
        return [reply.outputs["i"] for reply in replies]

    async def _watch_lag(self, pace: Pace) -> None:
        while True:
            before = pace.turns
            await asyncio.sleep(TURN_S)
            self.lag_s = max(self.lag_s, (pace.turns - before - 1) * TURN_S)


@contextlib.contextmanager
def waits(settings: Settings, ways: Iterable[str] = COUNTS, timeout_s: float = 40) -> Iterator[Any]:
    """Return a list of `Wait`, all of them waiting."""
    made = [Wait(way, settings, timeout_s) for way in ways]
    try:
        for wait in made:
            wait.start()
        yield made
    finally:
        for wait in made:
            wait.close()


class Answers:
    """Stores results in a worker's place."""

    def __init__(self, settings: Settings) -> None:
        self._app: FleetApp = make_app(settings)
        self._keys = Keys(prefix=settings.prefix)

    def payload(self, job_id: str, outputs: Any) -> Any:
        """Return the result of a job as it is stored."""
        backend = self._app.backend
        request = types.SimpleNamespace(group=None, children=[], fleet={})
        meta = backend._get_result_meta(outputs, states.SUCCESS, None, request)
        return backend.encode({**meta, "task_id": job_id})

    def store(
        self,
        client: redis.Redis,
        wait: Wait,
        *,
        announce: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Answer each job of ``wait`` with its number and ``more``, and say so if ``announce``."""
        with client.pipeline(transaction=False) as pipe:
            for number, job_id in enumerate(wait.ids):
                payload = self.payload(job_id, {"i": number, **(more or {})})
                key = self._keys.result(job_id)
                pipe.set(key, payload, ex=600)
                if announce:
                    pipe.publish(key, payload)
                    pipe.publish(self._keys.replies(wait.client.id), job_id)
            pipe.execute()


def finish(made: list[Wait], within_s: float) -> dict[str, float]:
    """Wait until each has got all its jobs; return how long each took, in seconds."""
    began_s = time.monotonic()
    took: dict[str, float] = {}
    for wait in made:
        wait.join(max(0.0, began_s + within_s - time.monotonic()))
        took[wait.way] = round(time.monotonic() - began_s, 2)
    for wait in made:
        assert not wait.is_alive(), f"{wait.way} waits after {within_s} s; {took}"
        assert wait.error is None, f"{wait.way}: {wait.error!r}"
        assert wait.got == list(range(COUNTS[wait.way])), wait.way
    return took
