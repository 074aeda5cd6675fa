"""The result backend of an app that `infer` is registered on: the app's own, reading ours too."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from typing import Any

import celery
import numpy as np
import pytest
from celery import Celery, group, states
from celery.backends.redis import RedisBackend
from celery.backends.redis import ResultConsumer as StockConsumer
from celery.exceptions import TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import GroupResult

from producer.contract.app import make_app
from producer.contract.errors import BadRequest, Cancelled, Expired, FleetError
from producer.contract.names import Keys
from producer.contract.results import AppBackend, FleetBackend
from producer.contract.settings import Settings
from producer.tasks import register
from tests.unit.producer.conftest import Worker, store_result

pytestmark = pytest.mark.redis

ROW = np.ones((1, 4), np.float32)


@pytest.fixture
def own(settings: Settings) -> Iterator[Celery]:
    """An app on stock lists and JSON results in the Redis of the fleet."""
    own = Celery(broker=settings.broker_url, backend=settings.broker_url, set_as_current=False)
    yield own
    if isinstance(own.backend, AppBackend):
        own.backend.waiter.close()
    own.backend.result_consumer.stop()
    # A result that is dropped later would connect again, to unsubscribe.
    own.backend.result_consumer.subscribed_to.clear()
    own.backend.client.connection_pool.disconnect()
    own.close()


@pytest.mark.parametrize("registered", ["first", "once configured", "once used"])
def test_the_backend_reads_both_whenever_infer_is_registered(
    own: Celery, settings: Settings, client: Any, registered: str
) -> None:
    if registered == "once configured":
        assert own.conf.result_serializer == "json"
    if registered == "once used":
        assert type(own.backend) is RedisBackend
        own.backend.client.connection_pool.disconnect()
    infer = register(own, settings)
    with make_app(settings) as fleet:
        store_result(fleet, client, "ours", states.SUCCESS, {"y": ROW})
    theirs = {"status": "SUCCESS", "result": 7, "task_id": "theirs"}
    client.set("celery-task-meta-theirs", json.dumps(theirs), ex=60)

    assert own.AsyncResult("ours").get(timeout=1)["y"].tolist() == ROW.tolist()
    assert own.AsyncResult("theirs").get(timeout=1) == 7
    assert infer.backend is own.backend


def test_a_backend_that_another_thread_uses_is_renewed(own: Celery, settings: Settings) -> None:
    used, registered, kinds = threading.Event(), threading.Event(), []

    def look() -> None:
        kinds.append(type(own.backend))
        used.set()
        registered.wait(5)
        kinds.append(type(own.backend))

    thread = threading.Thread(target=look)
    thread.start()
    used.wait(5)
    register(own, settings)
    registered.set()
    thread.join()

    assert kinds == [RedisBackend, AppBackend]


def test_all_else_of_the_backend_is_as_celery_has_it(own: Celery, settings: Settings) -> None:
    own.conf.update(redis_socket_timeout=7.5, result_expires=77, redis_max_connections=5)
    stock = RedisBackend(app=own, url=settings.broker_url)
    register(own, settings)
    meta = {"status": "SUCCESS", "result": [1, "ä", None], "task_id": "x"}

    assert type(own.backend) is AppBackend
    assert type(own.backend.result_consumer) is StockConsumer
    assert own.backend.connparams == stock.connparams
    assert own.backend.expires == stock.expires == 77
    assert own.backend.encode(meta) == stock.encode(meta) == json.dumps(meta)
    assert own.backend.as_uri() == stock.as_uri()


def test_results_by_tls_keep_what_their_url_says(settings: Settings) -> None:
    url = "rediss://example.org:1/2?ssl_cert_reqs=CERT_REQUIRED"
    with Celery(backend=url, set_as_current=False) as own:
        stock = RedisBackend(app=own, url=url)
        infer = register(own, settings)

        assert type(own.backend) is AppBackend
        assert own.backend.connparams == stock.connparams
        assert type(infer.backend) is FleetBackend


@pytest.mark.parametrize("backend", ["rpc://", "cache+memory://", None])
def test_another_backend_stays_and_jobs_are_read_from_the_fleet(
    settings: Settings, worker: Worker, backend: str | None
) -> None:
    with Celery(backend=backend, broker="memory://", set_as_current=False) as own:
        before = own.backend
        infer = register(own, settings)

        assert own.backend is before
        assert infer.delay("digits", {"i": 1}).get(timeout=5) == {"i": 1}
        infer.publisher.close()


def test_what_an_app_puts_in_place_of_a_backend_stays(settings: Settings) -> None:
    with Celery(backend="redis://", set_as_current=False) as own:
        own.config_from_object({"override_backends": {"redis": "celery.backends.rpc:RPCBackend"}})
        register(own, settings)

        assert type(own.backend).__name__ == "RPCBackend"
        assert type(own.loader).override_backends == {}


def test_results_under_another_prefix_are_not_the_fleets(own: Celery, settings: Settings) -> None:
    own.conf.result_backend_transport_options = {"global_keyprefix": "own_"}

    assert type(register(own, settings).backend) is FleetBackend


OLD = pytest.mark.skipif(
    celery.__version__.startswith("5.4."), reason="Celery 5.4 puts a _ behind every prefix"
)


@pytest.mark.parametrize("prefix", [pytest.param("a:", marks=OLD), "a"])
def test_an_app_reads_results_under_the_prefix_that_it_shares_with_the_fleet(
    own: Celery, settings: Settings, client: Any, prefix: str
) -> None:
    own.conf.result_backend_transport_options = {"global_keyprefix": prefix}
    shared = dataclasses.replace(settings, prefix=prefix)
    with make_app(shared) as fleet:
        store_result(fleet, client, "ours", states.SUCCESS, {"y": ROW})

    assert register(own, shared).backend is own.backend
    assert own.AsyncResult("ours").get(timeout=1)["y"].tolist() == ROW.tolist()
    assert client.exists(Keys(prefix=prefix).result("ours"))


def test_localhost_and_its_address_are_one_place(settings: Settings) -> None:
    here = settings.broker_url.replace("127.0.0.1", "localhost")
    with Celery(backend=here, set_as_current=False) as own:
        assert register(own, settings).backend is own.backend


def test_a_task_is_subscribed_to_as_ever_and_a_job_is_not(
    own: Celery, settings: Settings, client: Any
) -> None:
    infer = register(own, settings)
    consumer = own.backend.result_consumer

    infer.delay("digits", {"image": ROW})
    infer.apply_async(("digits", {"image": ROW}), link=own.signature("own.task"))

    assert consumer.subscribed_to == set()
    sent = own.send_task("own.task")
    assert consumer.subscribed_to == {f"celery-task-meta-{sent.id}".encode()}
    sent.forget()
    infer.publisher.close()


def test_a_group_of_jobs_is_got(own: Celery, settings: Settings, worker: Worker) -> None:
    infer = register(own, settings)
    jobs = group(infer.s("digits", {"i": number}) for number in range(20))

    replies = jobs.apply_async().get(timeout=10)

    assert [reply["i"] for reply in replies] == list(range(20))
    infer.publisher.close()


@pytest.mark.parametrize("serializer", ["json", "yaml", "pickle", "msgpack"])
def test_an_error_is_read_as_its_class_in_every_format(
    own: Celery, settings: Settings, client: Any, serializer: str
) -> None:
    if serializer == "yaml":
        pytest.importorskip("yaml")
    own.conf.update(result_serializer=serializer, accept_content=[serializer])
    register(own, settings)
    with make_app(settings) as fleet:
        store_result(fleet, client, "failed", states.FAILURE, BadRequest("what to do"))
        store_result(fleet, client, "answered", states.SUCCESS, {"y": ROW})

    with pytest.raises(BadRequest, match="what to do"):
        own.AsyncResult("failed").get(timeout=1)
    assert own.AsyncResult("answered").get(timeout=1)["y"].tolist() == ROW.tolist()
    unknown = {
        "exc_type": "FromLater",
        "exc_message": ["x"],
        "exc_module": "producer.contract.errors",
    }
    assert type(own.backend.exception_to_python(unknown)) is FleetError


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
@pytest.mark.parametrize(("word", "error"), [("revoked", Cancelled), ("expired", Expired)])
def test_what_a_stock_worker_stores_for_a_revoked_job_is_our_error(
    own: Celery, settings: Settings, word: str, error: type[FleetError]
) -> None:
    infer = register(own, settings)
    infer.backend.store_result("theirs", TaskRevokedError(word), states.REVOKED)

    with pytest.raises(error):
        infer.AsyncResult("theirs").get(timeout=1)
    assert infer.AsyncResult("theirs").state == "REVOKED"
    with pytest.raises(TaskRevokedError):
        own.AsyncResult("theirs").get(timeout=1)


def test_a_lost_publish_does_not_hang_a_job_or_a_group_with_one(
    own: Celery, settings: Settings, client: Any
) -> None:
    infer = register(own, settings)
    result = infer.AsyncResult("ours")
    mixed = GroupResult("mixed", [infer.AsyncResult("ours"), own.AsyncResult("theirs")], app=own)
    theirs = {"status": "SUCCESS", "result": 7, "task_id": "theirs"}

    def store_without_telling() -> None:
        with make_app(settings) as fleet:
            store_result(fleet, client, "elsewhere", states.SUCCESS, 3)
        client.rename("celery-task-meta-elsewhere", "celery-task-meta-ours")
        client.set("celery-task-meta-theirs", json.dumps(theirs), ex=60)

    thread = threading.Timer(0.3, store_without_telling)
    thread.start()

    assert mixed.get(timeout=5) == [3, 7]
    assert result.get(timeout=5) == 3
    thread.join()


def test_a_job_of_an_app_ends_by_the_fleets_default(own: Celery, settings: Settings) -> None:
    infer = register(own, dataclasses.replace(settings, reply_timeout_s=0.3))

    with pytest.raises(CeleryTimeoutError, match="FLEET_REPLY_TIMEOUT_S"):
        infer.delay("digits", {"image": ROW}).get()

    infer.publisher.close()


def test_jobs_in_a_chain_of_an_app_are_told_from_its_tasks(own: Celery, settings: Settings) -> None:
    infer = register(own, settings)
    task = own.signature("own.task")

    last = (task | infer.for_model("digits").s()).freeze()

    assert own.backend.is_ours(last)
    assert not own.backend.is_ours(last.parent)


def test_the_last_job_of_a_chain_is_read_where_the_app_has_no_backend(
    settings: Settings, worker: Worker
) -> None:
    with Celery(broker=settings.broker_url, set_as_current=False) as own:
        infer = register(own, settings)
        last = (own.signature("own.task") | infer.for_model("digits").s()).freeze()

        infer.apply_async(("digits", {"i": 1}), task_id=last.id)

        with pytest.raises(AttributeError, match="DisabledBackend"):
            last.get(timeout=5)
        assert infer.AsyncResult(last.id).get(timeout=5) == {"i": 1}
        infer.publisher.close()
