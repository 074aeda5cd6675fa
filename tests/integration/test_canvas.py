"""Celery's canvas across two workers: an app's own tasks on a plain worker, `infer` on ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery, chain, chord, group, states
from celery.backends.redis import RedisBackend
from celery.exceptions import ChordError

from producer.contract.errors import BadRequest, EngineFailed, FleetError
from producer.contract.results import BACKEND
from producer.tasks import Infer
from tests.support.app import own_app, running_plain_worker, runs
from tests.support.engines import Do, row
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker

pytestmark = pytest.mark.redis

MODEL = "scripted"
RAISE = row(Do.RAISE)


@pytest.fixture(scope="module")
def workers(server: TestServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run a fleet worker and a plain one on one Redis."""
    log = tmp_path_factory.mktemp("plain") / "plain.log"
    with server.client() as client:
        client.flushall()
    with (
        config_folder({MODEL: {**SCRIPTED, "options": {}}}) as config,
        running_plain_worker(server, log),
        running_worker(server, config, node="canvas"),
    ):
        yield


def wait_done(client: redis.Redis) -> None:
    """Wait until neither worker has a job, or a task, in hand or before it."""
    wait_until(
        lambda: not client.keys("unacked*") and not client.keys("fleet:journal:*"),
        what="both workers to be done",
    )


@pytest.fixture(autouse=True)
def settled(no_lasting_keys: None, workers: None, server: TestServer) -> Iterator[None]:
    """Let both workers put away what a test's last task and job have left to do."""
    yield
    with server.client() as client:
        wait_done(client)


@pytest.fixture
def broker(workers: None, server: TestServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        client.delete("own:total", "own:failed")
        yield client


@pytest.fixture
def own_and_infer(workers: None, server: TestServer) -> Iterator[tuple[Celery, Infer]]:
    with own_app(server.url) as both:
        yield both


@pytest.fixture
def own(own_and_infer: tuple[Celery, Infer]) -> Celery:
    return own_and_infer[0]


@pytest.fixture
def infer(own_and_infer: tuple[Celery, Infer]) -> Infer:
    return own_and_infer[1]


def all_runs(own: Celery, broker: redis.Redis, task: str) -> list[str]:
    """Return what a task noted, once everything that was sent has been run.

    The plain worker runs one task after the other: the last one sent is the last one run.
    """
    wait_done(broker)
    own.tasks["own.row"].delay().get(timeout=15)
    return runs(broker, task)


def ran_once_and_no_more(own: Celery, broker: redis.Redis, task: str) -> bool:
    """Whether a task ran once, after everything that was sent has been run."""
    wait_until(lambda: runs(broker, task), what=f"own.{task} to run")
    return len(all_runs(own, broker, task)) == 1


def test_a_chain_goes_from_a_task_of_the_app_through_infer_to_another(
    own: Celery, infer: Infer, broker: redis.Redis
) -> None:
    steps = chain(
        own.tasks["own.row"].s(1, 2, 3), infer.for_model(MODEL).s(), own.tasks["own.total"].s()
    )

    result = steps.apply_async()

    assert result.get(timeout=15) == 12
    # A step is sent before the result of the one before is stored.
    wait_until(lambda: result.parent.state == "SUCCESS", what="the job's own result")
    assert result.parent.get(timeout=1)["y"].tolist() == [[2, 4, 6]]
    assert ran_once_and_no_more(own, broker, "total")


def test_a_chain_ends_where_a_job_fails(own: Celery, infer: Infer, broker: redis.Redis) -> None:
    steps = chain(infer.s(MODEL, {"wrong": row()}), own.tasks["own.total"].s())

    result = steps.apply_async()

    with pytest.raises(BadRequest):
        result.get(timeout=15)
    assert result.parent.state == "FAILURE"
    assert all_runs(own, broker, "total") == []


def test_a_chain_is_awaited_while_its_job_runs(own: Celery, infer: Infer) -> None:
    for _ in range(30):
        # Made anew: Celery gives a chain that is sent again the id, and so the result, of before.
        steps = infer.s(MODEL, {"x": row(argument=2)}) | own.tasks["own.total"].s()
        assert steps.delay().get(timeout=15) == 4


def test_an_errback_of_a_chain_gets_the_id_of_the_job_that_failed(
    own: Celery, infer: Infer, broker: redis.Redis
) -> None:
    steps = chain(infer.s(MODEL, {"x": RAISE}), own.tasks["own.total"].s())

    result = steps.apply_async(link_error=own.tasks["own.failed"].s())

    with pytest.raises(EngineFailed, match="told to"):
        result.get(timeout=15)
    assert ran_once_and_no_more(own, broker, "failed")
    assert runs(broker, "failed") == [result.parent.id]
    assert all_runs(own, broker, "total") == []


def test_an_app_with_the_backend_of_the_fleet_does_the_same(
    workers: None, server: TestServer
) -> None:
    with own_app(server.url, backend=f"{BACKEND}+") as (own, infer):
        job = infer.s(MODEL, {"x": row(argument=1)})
        mixed = [job, own.tasks["own.answer"].s(3, others=1)]

        assert chain(job, own.tasks["own.total"].s()).apply_async().get(timeout=15) == 2
        assert len(group([job, job]).apply_async().get(timeout=15)) == 2
        assert chord(mixed)(own.tasks["own.total"].s()).get(timeout=15) == 5


def test_a_group_of_jobs_is_answered_in_its_order(infer: Infer) -> None:
    jobs = group(infer.s(MODEL, {"x": row(argument=number)}) for number in range(40))

    replies = jobs.apply_async().get(timeout=15)

    assert [reply["y"][0, 1] for reply in replies] == [2 * number for number in range(40)]


def test_the_body_of_a_chord_runs_once_on_the_workers_of_the_app(
    own: Celery, infer: Infer, broker: redis.Redis
) -> None:
    header = [infer.s(MODEL, {"x": row(argument=1)}) for _ in range(40)]

    result = chord(header)(own.tasks["own.total"].s())

    assert result.get(timeout=15) == 80
    assert ran_once_and_no_more(own, broker, "total")


def test_a_chord_with_tasks_of_both_workers_ends(own: Celery, infer: Infer) -> None:
    header = [
        infer.s(MODEL, {"x": row(argument=1)}),
        chain(own.tasks["own.row"].s(0, 2, 0), infer.for_model(MODEL).s()),
    ]

    result = chord(header)(own.tasks["own.total"].s())

    assert result.get(timeout=15) == 6


@pytest.mark.parametrize("last", ["own", "job"])
@pytest.mark.parametrize("body", ["task", "chain", "group"])
def test_the_body_of_a_chord_gets_arrays_whoever_ends_it(
    own: Celery, infer: Infer, last: str, body: str
) -> None:
    total, answer = own.tasks["own.total"], own.tasks["own.answer"]
    header, expected = {
        "own": ([infer.s(MODEL, {"x": row(argument=1)}), answer.s(3, others=1)], 5),
        "job": ([infer.s(MODEL, {"x": row(Do.SLEEP, 0.25)}), answer.s(3)], 23.5),
    }[last]
    steps, ends = {
        "task": (total.s(), expected),
        "chain": (chain(total.s(), answer.s()), {"y": [[expected]]}),
        "group": (group(total.s(), total.s()), [expected, expected]),
    }[body]

    assert chord(header)(steps).get(timeout=15) == ends


def test_groups_in_a_chord_are_answered(own: Celery, infer: Infer) -> None:
    jobs = group(infer.s(MODEL, {"x": row(argument=number)}) for number in range(3))

    result = chord([jobs, own.tasks["own.answer"].s(3)])(own.tasks["own.shape"].s())

    # Celery flattens the group into the header, and leaves the order there open.
    assert sorted(result.get(timeout=15)) == [[0, 0, 0], [0, 2, 0], [0, 4, 0], [3]]


def test_a_job_is_followed_by_a_group(own: Celery, infer: Infer) -> None:
    total, answer = own.tasks["own.total"], own.tasks["own.answer"]
    steps = chain(infer.s(MODEL, {"x": row(argument=1)}), group(total.s(), total.s() | answer.s()))

    assert steps.apply_async().get(timeout=15) == [2, {"y": [[2]]}]


def test_a_group_of_jobs_and_tasks_is_answered_in_its_order(own: Celery, infer: Infer) -> None:
    members = [
        infer.s(MODEL, {"x": row(argument=1)}),
        own.tasks["own.answer"].s(3),
        chain(own.tasks["own.row"].s(0, 2, 0), infer.for_model(MODEL).s()),
    ]

    replies = group(members).apply_async().get(timeout=15)

    assert [list(reply["y"][0]) for reply in replies] == [[0, 2, 0], [3], [0, 4, 0]]


def test_a_body_that_is_infer_gets_what_the_header_answered(own: Celery, infer: Infer) -> None:
    steps = chord([own.tasks["own.row"].s(1, 1, 1)], own.tasks["own.first"].s())

    result = chain(steps, infer.for_model(MODEL).s()).apply_async()

    assert result.get(timeout=15)["y"].tolist() == [[2, 2, 2]]


def test_a_member_that_fails_ends_its_chord_in_an_error(
    own: Celery, infer: Infer, broker: redis.Redis
) -> None:
    header = [infer.s(MODEL, {"x": row()}), infer.s(MODEL, {"x": RAISE})]

    result = chord(header)(own.tasks["own.total"].s())

    error = result.get(timeout=15, propagate=False)
    assert isinstance(error, ChordError)
    assert "told to" in str(error)
    assert all_runs(own, broker, "total") == []


def test_a_member_that_is_refused_or_expired_ends_its_chord_in_an_error(
    own: Celery, infer: Infer
) -> None:
    good = infer.s(MODEL, {"x": row()})
    expired = infer.s(MODEL, {"x": row()}).set(expires=1e-6)
    unfit = infer.s(MODEL, {"wrong": row()})

    results = [chord([good, bad])(own.tasks["own.total"].s()) for bad in (expired, unfit)]

    errors = [result.get(timeout=15, propagate=False) for result in results]
    assert [type(error) for error in errors] == [ChordError, ChordError]
    assert "Expired" in str(errors[0])
    assert "BadRequest" in str(errors[1])


def test_a_link_gets_the_answer(own: Celery, infer: Infer, broker: redis.Redis) -> None:
    job = infer.s(MODEL, {"x": row(argument=4)})

    result = job.apply_async(link=own.tasks["own.total"].s())

    assert result.get(timeout=15)["y"].sum() == 8
    assert ran_once_and_no_more(own, broker, "total")
    wait_until(lambda: result.children, what="the link to be known as a child")
    assert result.children[0].get(timeout=15) == 8


def test_a_link_waits_in_the_queue_that_its_signature_names(
    own: Celery, infer: Infer, broker: redis.Redis
) -> None:
    link = own.tasks["own.total"].s().set(queue="mine")

    infer.apply_async((MODEL, {"x": row()}), link=link)

    wait_until(lambda: broker.llen("mine") == 1, what="the link in its queue")
    broker.delete("mine")


@pytest.mark.parametrize(
    "inputs", [{"x": RAISE}, {"wrong": row()}], ids=["failed in the engine", "unfit"]
)
def test_an_errback_gets_the_id_of_the_job(
    own: Celery, infer: Infer, broker: redis.Redis, inputs: dict[str, object]
) -> None:
    job = infer.s(MODEL, inputs)

    result = job.apply_async(link_error=own.tasks["own.failed"].s())

    with pytest.raises(FleetError):
        result.get(timeout=15)
    assert ran_once_and_no_more(own, broker, "failed")
    assert runs(broker, "failed") == [result.id]


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_tasks_of_the_app_leave_the_results_of_stock_celery(
    own: Celery, infer: Infer, broker: redis.Redis, server: TestServer
) -> None:
    sent = own.tasks["own.answer"].delay(3)
    value = sent.get(timeout=15)
    with Celery(broker=server.url, backend=server.url, set_as_current=False) as stock:
        assert type(stock.backend) is RedisBackend
        stock.backend.store_result("of-stock", value, states.SUCCESS)
        key, of_stock = map(stock.backend.get_key_for_task, (sent.id, "of-stock"))

    found: Any = broker.mget(key, of_stock)
    stored, like = found
    date_done = json.loads(stored)["date_done"]
    changed = {"task_id": sent.id, "date_done": date_done, "children": []}
    assert stored == json.dumps({**json.loads(like), **changed}).encode()
    assert 0 <= broker.ttl(of_stock) - broker.ttl(key) <= 20
    assert (broker.type(key), sent.backend.serializer) == (b"string", "json")
