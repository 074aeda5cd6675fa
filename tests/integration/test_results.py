"""Results as Celery knows them: the same fields by both ways to them, and those of stock Celery."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery, states

from producer.contract.app import make_app
from producer.contract.errors import BadRequest, EngineFailed, Expired
from producer.contract.names import Keys
from producer.contract.results import FleetBackend
from producer.contract.settings import Settings
from producer.tasks import Infer, register
from tests.support.engines import Do, row
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = pytest.mark.redis

MODEL = "scripted"
#: A link that no worker takes: enough to send a job through Celery's tracer.
NOBODY = "own.nobody"


@pytest.fixture(scope="module")
def worker(server: TestServer) -> Iterator[Worker]:
    with server.client() as client:
        client.flushall()
    with (
        config_folder({MODEL: {**SCRIPTED, "options": {}}}) as config,
        running_worker(server, config, node="results") as running,
    ):
        yield running


@pytest.fixture(scope="module")
def infer(worker: Worker, server: TestServer) -> Infer:
    return register(make_app(Settings(broker_url=server.url)))


@pytest.fixture
def broker(worker: Worker, server: TestServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client
        client.delete("celery")


def ended(infer: Infer, inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Send a job and return its result as it is stored."""
    job = infer.apply_async((MODEL, inputs), **options)
    backend = job.backend
    assert isinstance(backend, FleetBackend)
    stored = wait_until(lambda: backend.get(Keys().result(job.id)), what="the result")
    return dict(backend.decode(stored))


@pytest.mark.parametrize(
    ("inputs", "options", "state"),
    [
        ({"x": row(argument=3)}, {}, states.SUCCESS),
        ({"x": row(Do.RAISE)}, {}, states.FAILURE),
        ({"wrong": row()}, {}, states.FAILURE),
        ({"x": row()}, {"expires": 1e-6}, states.REVOKED),
    ],
    ids=["answered", "failed", "refused", "expired"],
)
def test_a_job_through_the_tracer_leaves_the_fields_of_one_that_went_directly(
    infer: Infer, broker: redis.Redis, inputs: Any, options: Any, state: str
) -> None:
    link = infer.app.signature(NOBODY)

    direct = ended(infer, inputs, **options)
    traced = ended(infer, inputs, link=link, **options)

    assert direct["status"] == traced["status"] == state
    assert list(direct) == list(traced)
    assert direct["fleet"].keys() == traced["fleet"].keys()
    assert type(direct["result"]) is type(traced["result"])
    for name in ("model", "attempts", "worker"):
        assert direct["fleet"][name] == traced["fleet"][name]
    if state != states.SUCCESS:
        assert direct["result"]["exc_type"] == traced["result"]["exc_type"]
        assert direct["result"]["exc_module"] == traced["result"]["exc_module"]


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_a_result_has_the_fields_of_stock_celery_and_one_more(
    infer: Infer, broker: redis.Redis, server: TestServer
) -> None:
    stock = Celery(broker=server.url, backend=server.url)
    with stock:
        stock.backend.store_result("of-celery", {"y": 1}, states.SUCCESS)
        of_celery = stock.backend.get_task_meta("of-celery")

    ours = ended(infer, {"x": row()})

    assert ours.keys() - of_celery.keys() == {"fleet"}
    assert of_celery.keys() <= ours.keys()


def test_a_result_is_read_forgotten_and_gone(infer: Infer, broker: redis.Redis) -> None:
    job = infer.delay(MODEL, {"x": row(argument=2)})

    assert job.get(timeout=10)["y"].tolist() == [[0, 4, 0]]
    assert (job.state, job.successful(), job.traceback) == ("SUCCESS", True, None)
    assert 3500 < broker.ttl(Keys().result(job.id)) <= 3600
    job.forget()

    assert not broker.exists(Keys().result(job.id))
    assert infer.AsyncResult(job.id).state == "PENDING"


def test_a_failure_says_what_and_keeps_the_machinery_to_itself(infer: Infer) -> None:
    job = infer.delay(MODEL, {"x": row(Do.RAISE)})

    with pytest.raises(EngineFailed, match="told to"):
        job.get(timeout=10)
    assert job.state == "FAILURE"
    assert job.failed()
    assert job.traceback is None


@pytest.mark.parametrize(
    ("inputs", "options", "error"),
    [({"wrong": row()}, {}, BadRequest), ({"x": row()}, {"expires": 1e-6}, Expired)],
)
def test_an_error_comes_back_as_the_class_it_was(
    infer: Infer, inputs: Any, options: Any, error: type[Exception]
) -> None:
    job = infer.apply_async((MODEL, inputs), **options)

    with pytest.raises(error):
        job.get(timeout=10)


def test_a_job_of_another_app_stays_where_it_is(
    infer: Infer, broker: redis.Redis, server: TestServer
) -> None:
    with Celery(broker=server.url, backend=server.url) as other:
        other.send_task("other.task", task_id="theirs")

    infer.delay(MODEL, {"x": row()}).get(timeout=10)

    assert broker.llen("celery") == 1
    assert "theirs" in str(broker.lindex("celery", 0))
