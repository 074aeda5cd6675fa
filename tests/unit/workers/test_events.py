"""How many messages the events of an instance take, on a real server."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator

import pytest
import redis

from producer.contract.app import make_app
from producer.contract.settings import Settings
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from workers.delivery.ledger import Entry
from workers.loop.jobs import Job
from workers.telemetry.events import TaskEvents

pytestmark = pytest.mark.redis


class Heard:
    """What was published on Celery's channels of events: for each message, the ids in it."""

    def __init__(self, client: redis.Redis) -> None:
        self._pubsub = client.pubsub()
        self._pubsub.psubscribe("*celeryev*")
        self.messages: list[list[str]] = []
        wait_until(lambda: self._pubsub.get_message(timeout=0.1), what="the subscription")

    def ids(self) -> list[str]:
        while message := self._pubsub.get_message(timeout=0.01):
            body = json.loads(base64.b64decode(json.loads(message["data"])["body"]))
            self.messages.append([event["uuid"] for event in body])
        return [job_id for message in self.messages for job_id in message]


@pytest.fixture
def heard(server: TestServer) -> Iterator[Heard]:
    with server.client() as client:
        yield Heard(client)


@pytest.fixture
def events(server: TestServer) -> Iterator[TaskEvents]:
    made = TaskEvents(make_app(Settings(broker_url=server.url)), node="one@test", enabled=True)
    yield made
    made.reconnect()


def job(number: int) -> Job:
    entry = Entry(stream="s", entry_id=f"{number}-0", fields={})
    return Job(entry=entry, job_id=str(number), headers={}, properties={})


def test_events_of_batches_that_follow_at_once_are_sent_together(
    events: TaskEvents, heard: Heard
) -> None:
    began_s = time.monotonic()

    for number in range(200):
        events.started(job(number))
        events.flush_when_due()
    took_s = time.monotonic() - began_s
    events.flush()

    wait_until(lambda: len(heard.ids()) == 200, what="all events")
    assert heard.ids() == [str(number) for number in range(200)]
    assert len(heard.messages) <= 2 + took_s / 0.05


def test_an_event_waits_for_no_other(events: TaskEvents, heard: Heard) -> None:
    events.started(job(1))
    events.flush_when_due()
    events.started(job(2))

    def both_are_heard() -> bool:
        events.flush_when_due()
        return heard.ids() == ["1", "2"]

    wait_until(both_are_heard, what="the second event, without a third")
