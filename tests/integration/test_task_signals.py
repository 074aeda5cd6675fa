"""Celery's signals of a task that runs, for each job, in the process that answers it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import signals

from producer.contract.app import make_app
from producer.contract.errors import BadRequest, Cancelled, Expired, FleetError
from producer.contract.settings import Settings
from tests.support.servers import TestServer
from workers.delivery.ledger import Entry
from workers.loop.answers import Answer, Answers, register_infer
from workers.loop.jobs import Job

pytestmark = pytest.mark.redis

NAMES = ("prerun", "postrun", "success", "failure", "revoked")


@pytest.fixture
def heard() -> Iterator[list[tuple[str, Any]]]:
    """What is told by signals meanwhile: the name of each, and the id of the job."""
    told: list[tuple[str, Any]] = []
    listeners = {}
    for name in NAMES:

        def listen(sender: Any, name: str = name, **facts: Any) -> None:
            request = facts.get("request") or sender.request
            told.append((name, request.id))

        listeners[name] = listen
        getattr(signals, f"task_{name}").connect(listen)
    yield told
    for name, listen in listeners.items():
        getattr(signals, f"task_{name}").disconnect(listen)


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (None, ["prerun", "success", "postrun"]),
        (BadRequest("what to do"), ["prerun", "failure", "postrun"]),
        (Expired("too late"), ["revoked"]),
        (Cancelled("not wanted"), ["revoked"]),
    ],
    ids=["answered", "failed", "expired", "cancelled"],
)
def test_whoever_listens_hears_of_each_job(
    server: TestServer, heard: list[tuple[str, Any]], error: FleetError | None, names: list[str]
) -> None:
    with make_app(Settings(broker_url=server.url)) as app:
        register_infer(app)
        answers = Answers(app)
        entry = Entry(stream="s", entry_id="1-0", fields={})
        job = Job(entry=entry, job_id="j", headers={"id": "j"}, properties={})

        assert answers.needs_tracer(job)
        assert answers.trace(Answer(job=job, outputs={"y": 1}, error=error))
        app.backend.client.connection_pool.disconnect()

    assert heard == [(name, "j") for name in names]
