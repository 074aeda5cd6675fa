"""Celery's events of a worker, taken by Celery's own receiver: what Flower is fed with."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery
from celery.events.state import State

from producer.contract.app import make_app
from producer.contract.settings import Settings
from producer.tasks import Infer, register
from tests.support.engines import Do, row
from tests.support.listener import Event, Listener
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = pytest.mark.redis

MODEL = "scripted"
#: Waits for so long to fill a batch of two rows.
PATIENT, DELAY_S = "patient", 2.0
NODE = "events@test"
#: A value that no shape, id or time has; it must appear in no event.
SECRET = 7.4321


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that holds the engine at a numbered job for as long as it is there."""
    return tmp_path_factory.mktemp("events") / "held"


@pytest.fixture(scope="module")
def worker(server: TestServer, held: Path) -> Iterator[Worker]:
    with server.client() as client:
        client.flushall()
    options = {"out_of_memory_above": {"fp32": 4}, "held_while": str(held)}
    patient = {**SCRIPTED, "max_batch_size": 2, "max_queue_delay_s": DELAY_S}
    models = {MODEL: {**SCRIPTED, "options": options}, PATIENT: patient}
    with (
        config_folder(models) as config,
        running_worker(
            server, config, "--heartbeat-interval", "1", node="events", wait=False
        ) as running,
    ):
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def app(worker: Worker, server: TestServer) -> Celery:
    return make_app(Settings(broker_url=server.url))


@pytest.fixture(autouse=True)
def nobodys_list_is_emptied(server: TestServer) -> Iterator[None]:
    yield
    with server.client() as client:
        client.delete("celery")


@pytest.fixture(scope="module")
def infer(app: Celery) -> Infer:
    return register(app)


@pytest.fixture
def listener(app: Celery) -> Iterator[Listener]:
    listening = Listener(app)
    yield listening
    listening.stop()


def kinds(events: list[Event]) -> dict[str, list[str]]:
    """Return the kinds of events of each job, in their order."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for event in sorted(events, key=lambda event: event["clock"]):
        found[event["uuid"]].append(event["type"].removeprefix("task-"))
    return dict(found)


def test_every_job_of_a_batch_is_told_from_its_start_to_its_end(
    infer: Infer, listener: Listener, worker: Worker
) -> None:
    before = infer.delay(MODEL, {"x": row(Do.SLEEP, 0.3)})
    good = [infer.delay(MODEL, {"x": row(argument=SECRET)}) for _ in range(3)]
    wrong = infer.delay(MODEL, {"wrong": row(argument=SECRET)})
    late = infer.apply_async((MODEL, {"x": row()}), expires=1e-6)
    linked = infer.apply_async(
        (MODEL, {"x": row(argument=SECRET)}), link=infer.app.signature("own.nobody")
    )
    jobs = [before, *good, wrong, late, linked]
    ends = {"succeeded", "failed", "revoked"}
    told = [job.id for job in jobs]

    wait_until(
        lambda: sum(e["type"][5:] in ends for e in listener.of(*told)) == len(jobs),
        what="an end of every job",
    )

    expected = {
        **dict.fromkeys((job.id for job in (before, *good, linked)), "succeeded"),
        wrong.id: "failed",
        late.id: "revoked",
    }
    for job_id, seen in kinds(listener.of(*told)).items():
        assert seen[0] == "received"
        assert seen[-1] == expected[job_id]
        assert len(seen) == len(set(seen))
        if expected[job_id] == "succeeded":
            assert "started" in seen
    assert all(event["hostname"] == NODE for event in listener.of(*told))
    for value in (SECRET, 2 * SECRET):
        assert f"{value:.4f}" not in repr(listener.events)
        assert f"{value:.4f}" not in worker.log()


def test_monitors_see_models_and_states(infer: Infer, listener: Listener) -> None:
    job = infer.delay(MODEL, {"x": row()})
    wait_until(lambda: len(listener.of(job.id)) == 3, what="three events")
    state = State()

    for event in listener.events:
        state.event(event)

    task = state.tasks[job.id]
    assert (task.name, task.state) == ("fleet.infer.scripted", "SUCCESS")
    assert task.worker.hostname == NODE
    assert task.args == "('scripted', {x: float32[1, 3]})"
    assert task.runtime is not None


def test_a_job_of_a_stock_app_is_shown_under_its_model(
    listener: Listener, server: TestServer, worker: Worker
) -> None:
    with Celery(broker=server.url, set_as_current=False) as stock:
        job = stock.send_task(
            "fleet.infer", args=[MODEL, {"x": [[0, SECRET, 0]]}], queue=f"fleet.{MODEL}"
        )
        wait_until(lambda: len(listener.of(job.id)) == 3, what="three events")

    (received,) = (event for event in listener.of(job.id) if event["type"] == "task-received")
    assert (received["name"], received["args"]) == (
        "fleet.infer.scripted",
        "('scripted', {x: list[1]})",
    )
    for value in (SECRET, 2 * SECRET):
        assert f"{value:.4f}" not in repr(listener.events)
        assert f"{value:.4f}" not in worker.log()


def test_an_answer_after_a_lack_of_memory_is_told_as_a_retry(
    infer: Infer, listener: Listener
) -> None:
    job = infer.delay(MODEL, {"x": row().repeat(8, axis=0)})

    wait_until(lambda: len(listener.of(job.id)) == 4, what="four events")

    assert kinds(listener.of(job.id))[job.id] == ["received", "started", "retried", "succeeded"]
    (retried,) = (event for event in listener.of(job.id) if event["type"] == "task-retried")
    assert "OutOfMemory" in retried["exception"]


def test_an_end_is_told_while_the_next_batch_is_waited_for(
    infer: Infer, listener: Listener
) -> None:
    full = infer.delay(PATIENT, {"x": row(Do.SLEEP, 0.3).repeat(2, axis=0)})
    half = infer.delay(PATIENT, {"x": row()})

    wait_until(lambda: len(listener.of(full.id)) == 3, what="three events", timeout_s=DELAY_S / 2)

    assert not half.ready()
    half.get(timeout=2 * DELAY_S)


def test_heartbeats_count_what_runs_and_what_was_done(
    infer: Infer, worker: Worker, listener: Listener, held: Path
) -> None:
    def beat() -> Event:
        # Those that a receiver asks for when it comes tell no numbers.
        beats = [
            event
            for event in listener.events
            if event["type"] == "worker-heartbeat" and "active" in event
        ]
        return beats[-1] if beats else {"active": 0, "processed": 0}

    held.touch()
    job = infer.delay(MODEL, {"x": row(job=1)})

    wait_until(lambda: beat()["active"] == 1, what="a heartbeat with a running job")
    held.unlink()
    job.get(timeout=10)
    done = wait_until(lambda: worker.counters(MODEL).get("jobs"), what="the totals")
    wait_until(
        lambda: beat()["active"] == 0 and beat()["processed"] >= done,
        what="a heartbeat with the jobs that were done",
    )
