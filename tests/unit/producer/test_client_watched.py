"""Where somebody listens to Celery's signals, a Client's jobs are sent so that they are seen."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from celery import Task, signals
from kombu.exceptions import OperationalError

from producer.client import Client, Job
from producer.contract.errors import BadRequest
from producer.contract.message import from_fields
from producer.contract.names import INFER_TASK, Keys, Priority
from producer.contract.settings import Settings
from producer.testing import answering
from tests.support.waiting import wait_until
from tests.unit.producer.conftest import Worker

pytestmark = pytest.mark.redis

NORMAL: Final = Keys().stream("fleet.digits", Priority.NORMAL)
ROW: Final = np.ones((1, 4), np.float32)
#: Of whoever sends, as Sentry and OpenTelemetry keep the trace.
TRACE: Final[contextvars.ContextVar[str]] = contextvars.ContextVar("trace", default="none")


@pytest.fixture
def fleet(settings: Settings) -> Iterator[Client]:
    with Client(settings) as fleet:
        yield fleet


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """What was told of each job that is sent; each gets the trace of its sender as a header."""
    seen: list[str] = []

    def before(sender: str, headers: dict[str, Any], **_: Any) -> None:
        seen.append(f"before {sender} {TRACE.get()}")
        headers["traceparent"] = TRACE.get()

    def after(sender: str, **_: Any) -> None:
        seen.append(f"after {sender} {TRACE.get()}")

    # Once one that is held weakly is gone, Celery 5.4 tells nobody who comes later.
    signals.before_task_publish.connect(before, weak=False)
    signals.after_task_publish.connect(after, weak=False)
    yield seen
    signals.before_task_publish.disconnect(before)
    signals.after_task_publish.disconnect(after)


def submit(fleet: Client) -> None:
    fleet.submit("digits", {"image": ROW}, priority="low", expires_s=60, job_id="mine").reply(5)


def submit_many(fleet: Client) -> None:
    for job in fleet.submit_many("digits", [{"image": ROW}]):
        job.reply(5)


def infer(fleet: Client) -> None:
    asyncio.run(fleet.infer("digits", {"image": ROW}, timeout_s=5))


@pytest.mark.parametrize("send", [submit, submit_many, infer])
def test_a_job_is_seen_and_is_part_of_its_senders_trace(
    fleet: Client, worker: Worker, seen: list[str], send: Callable[[Client], None]
) -> None:
    token = TRACE.set("00-of-the-caller-01")
    try:
        send(fleet)
    finally:
        TRACE.reset(token)

    (message,) = worker.messages
    assert seen == [f"{when} {INFER_TASK} 00-of-the-caller-01" for when in ("before", "after")]
    assert message.headers["traceparent"] == "00-of-the-caller-01"
    assert message.headers["fleet_reply_to"] == fleet.id


def test_a_job_that_is_seen_is_the_same_as_one_that_is_not(
    fleet: Client, worker: Worker, request: pytest.FixtureRequest
) -> None:
    submit(fleet)
    request.getfixturevalue("seen")
    fleet.submit("digits", {"image": ROW}, priority="low", expires_s=60, job_id="other").reply(5)

    plain, watched = worker.messages
    changing = {"id", "root_id", "expires", "fleet_sent", "traceparent"}
    assert watched.body == plain.body
    for name, value in plain.headers.items():
        if name not in changing:
            assert watched.headers[name] == value, name
    assert watched.headers["id"] == watched.headers["root_id"] == "other"
    assert watched.headers["expires"] > plain.headers["expires"]
    assert watched.properties["priority"] == plain.properties["priority"]


def test_large_arrays_of_a_job_that_is_seen_are_kept_as_long_as_the_others(
    fleet: Client, client: Any, request: pytest.FixtureRequest
) -> None:
    large = {"image": np.ones((1, 20_000), np.float32)}
    fleet.submit("digits", large, expires_s=100)
    request.getfixturevalue("seen")
    fleet.submit("digits", large, expires_s=100)

    plain_s, watched_s = (client.ttl(key) for key in client.keys(Keys().blob("*")))

    assert abs(plain_s - watched_s) <= 5


def test_code_around_celerys_sees_a_job_too(
    fleet: Client, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    inner = Task.apply_async

    def wrapper(self: Task, *args: Any, **kwargs: Any) -> Any:
        sent.append(self.name)
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(Task, "apply_async", wrapper)

    submit(fleet)

    assert sent == [INFER_TASK]


@pytest.mark.parametrize("watched", [False, True], ids=["not seen", "seen"])
def test_of_many_jobs_one_that_is_bad_ends_the_sending(
    fleet: Client, worker: Worker, watched: bool, request: pytest.FixtureRequest
) -> None:
    seen = request.getfixturevalue("seen") if watched else []
    good, bad = {"i": 1}, {"i": {(1, 2): 3}}

    with pytest.raises(BadRequest, match="tuple") as raised:
        fleet.submit_many("digits", [good, good, bad, good])

    assert [job.reply(5).outputs for job in raised.value.jobs] == [good, good]  # type: ignore[attr-defined]
    assert len(worker.messages) == 2
    # Nobody was told of a job that was not sent.
    assert sum(told.startswith("after") for told in seen) == (2 if watched else 0)


def test_of_a_job_that_is_too_large_nobody_is_told_that_it_was_sent(
    settings: Settings, seen: list[str]
) -> None:
    small = dataclasses.replace(settings, max_body_bytes=1000)

    with Client(small) as fleet, pytest.raises(BadRequest, match="FLEET_MAX_BODY_BYTES"):
        fleet.submit("digits", {"image": np.ones((1, 1000), np.float32)})

    assert seen == [f"before {INFER_TASK} none"]


def test_many_that_are_seen_take_few_round_trips_and_each_is_of_its_senders_trace(
    fleet: Client, worker: Worker, client: Any, seen: list[str]
) -> None:
    fleet.submit("digits", {"i": 0}).reply(5)
    worker.stop()
    del seen[:], worker.messages[:]
    before = client.info("stats")["total_reads_processed"]

    token = TRACE.set("00-of-the-caller-01")
    try:
        jobs = fleet.submit_many("digits", ({"i": number} for number in range(1000)))
    finally:
        TRACE.reset(token)

    assert client.info("stats")["total_reads_processed"] - before < 200
    sent = [from_fields(fields) for _, fields in client.xrange(NORMAL)[1:]]
    assert [message.headers["id"] for message in sent] == [job.id for job in jobs]
    assert {message.headers["traceparent"] for message in sent} == {"00-of-the-caller-01"}
    assert len(seen) == 2 * len(jobs)


def test_large_arrays_of_jobs_that_are_seen_lie_in_a_folder_until_their_replies_are_read(
    settings: Settings, tmp_path: Path, seen: list[str], client: Any
) -> None:
    arrays = tmp_path / "arrays"
    wide = {"image": np.ones((1, 20_000), np.float32)}

    with Client(dataclasses.replace(settings, blob_url=arrays.as_uri())) as fleet:
        fleet.submit_many("digits", [wide, wide])
        assert len(list(arrays.iterdir())) == 2
        client.set(NORMAL, "no stream")
        with pytest.raises(OperationalError, match="WRONGTYPE"):
            fleet.submit_many("digits", [wide, wide])

    assert len(list(arrays.iterdir())) == 2


def test_whoever_is_told_of_a_job_may_send_one_in_the_middle_of_it(
    fleet: Client, worker: Worker, seen: list[str]
) -> None:
    inner: list[Job] = []

    def send_one(**_: Any) -> None:
        signals.before_task_publish.disconnect(send_one)
        inner.append(fleet.submit("digits", {"i": "inner"}))

    signals.before_task_publish.connect(send_one, weak=False)
    outer = fleet.submit_many("digits", [{"i": "outer"}, {"i": "last"}])

    assert [job.reply(5).outputs["i"] for job in inner + outer] == ["inner", "outer", "last"]
    assert len(worker.messages) == 3


def test_of_coroutines_that_are_seen_a_bad_one_fails_alone(
    fleet: Client, worker: Worker, seen: list[str]
) -> None:
    async def ask() -> list[Any]:
        many: list[dict[str, Any]] = [{"i": 1}, {"i": {(1, 2): 3}}, {"i": 2}]
        asked = [fleet.infer("digits", inputs, timeout_s=5) for inputs in many]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, bad, last = asyncio.run(ask())

    assert [first.outputs, last.outputs] == [{"i": 1}, {"i": 2}]
    assert isinstance(bad, BadRequest)


def test_a_closed_client_that_was_seen_leaves_no_connection(
    settings: Settings, worker: Worker, client: Any, seen: list[str]
) -> None:
    before = len(client.client_list())

    with Client(settings) as fleet:
        submit(fleet)
        del fleet

    wait_until(lambda: len(client.client_list()) <= before, what="all connections to be closed")


def test_in_an_apps_own_tests_a_job_is_answered_whoever_listens(
    settings: Settings, seen: list[str]
) -> None:
    with answering({"digits": lambda inputs: inputs}), Client(settings) as fleet:
        submit(fleet)

    assert not seen
