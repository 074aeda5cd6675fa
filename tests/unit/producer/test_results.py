"""``AsyncResult`` on the fleet's backend: Celery's format, errors as themselves, no hanging."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import redis
from celery import states
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import GroupResult

from producer.contract import errors
from producer.contract.app import FleetApp, make_app
from producer.contract.results import JobResult
from producer.contract.settings import Settings
from producer.tasks import Infer, register
from tests.support.waiting import wait_until
from tests.unit.producer.conftest import Worker, store_result

pytestmark = pytest.mark.redis

#: More than redis-py's own bound for one pool.
MANY_THREADS = 110
ROW = np.ones((1, 4), np.float32)


def test_a_result_is_got_with_its_arrays(infer: Infer, worker: Worker) -> None:
    answer = infer.delay("digits", {"image": ROW}).get(timeout=5)

    np.testing.assert_array_equal(answer["image"], ROW)


@pytest.mark.parametrize(
    "kind",
    [
        errors.BadRequest,
        errors.UnknownModel,
        errors.OutOfMemory,
        errors.JobTimeout,
        errors.Expired,
        errors.Cancelled,
        errors.EngineFailed,
    ],
)
def test_an_error_comes_back_as_its_class(
    infer: Infer, worker: Worker, kind: type[errors.FleetError]
) -> None:
    def refuse(_: Any) -> Any:
        raise kind("what to do")

    worker.answer = refuse
    result = infer.delay("digits", {"image": ROW})

    with pytest.raises(kind, match="what to do"):
        result.get(timeout=5)
    revoked = kind in (errors.Expired, errors.Cancelled)
    assert result.state == (states.REVOKED if revoked else states.FAILURE)


def test_an_errors_code_is_put_before_its_text_and_taken_off_again(app: FleetApp) -> None:
    stored = app.backend.prepare_exception(errors.BadRequest("what to do"))

    assert stored["exc_message"] == ["BAD_REQUEST: what to do"]
    assert str(app.backend.exception_to_python(stored)) == "what to do"


def test_an_error_that_this_version_does_not_know_is_still_ours(
    infer: Infer, app: FleetApp
) -> None:
    stored = {"exc_type": "FromLater", "exc_message": ["x"], "exc_module": errors.__name__}

    assert type(app.backend.exception_to_python(stored)) is errors.FleetError


def test_a_result_that_is_there_is_got_without_subscribing(
    infer: Infer, app: FleetApp, client: Any
) -> None:
    store_result(app, client, "there", states.SUCCESS, {"y": 1})
    # Results of tests before unsubscribe when they are dropped.
    gc.collect()
    client.config_resetstat()

    assert infer.AsyncResult("there").get(timeout=1) == {"y": 1}
    assert "cmdstat_subscribe" not in client.info("commandstats")


def test_a_lost_publish_does_not_hang_get(infer: Infer, app: FleetApp, client: Any) -> None:
    result = infer.AsyncResult("quiet")
    payload_app = make_app(app.settings)

    def store_without_telling() -> None:
        time.sleep(0.2)
        store_result(payload_app, client, "elsewhere", states.SUCCESS, 7)
        client.rename("celery-task-meta-elsewhere", "celery-task-meta-quiet")

    thread = threading.Thread(target=store_without_telling)
    thread.start()

    assert result.get(timeout=5) == 7
    thread.join()
    payload_app.close()


def test_get_keeps_a_short_timeout(infer: Infer) -> None:
    took_s = []
    for _ in range(3):
        began_s = time.monotonic()
        with pytest.raises(CeleryTimeoutError, match="`fleet queue` says what waits"):
            infer.AsyncResult("never").get(timeout=0.2)
        took_s.append(time.monotonic() - began_s)

    # A busy machine adds to some of them; a wait that is too long would be too long each time.
    assert min(took_s) < 0.6


def test_a_group_is_joined(infer: Infer, worker: Worker) -> None:
    from celery import group

    result = group(infer.s("digits", {"i": i}) for i in range(20)).apply_async()

    assert [answer["i"] for answer in result.get(timeout=10)] == list(range(20))


def test_what_the_worker_says_of_the_job_is_stored_beside_the_result(
    infer: Infer, app: FleetApp, worker: Worker
) -> None:
    result = infer.delay("digits", {"image": ROW})
    result.get(timeout=5)

    meta = app.backend.get_task_meta(result.id)
    assert meta["fleet"]["precision"] == "fp32"
    assert {"status", "result", "traceback", "children", "date_done", "task_id"} <= meta.keys()


def test_tls_to_the_results_is_verified() -> None:
    url = "rediss://user:secret@example.org:1/2"
    app = make_app(Settings(broker_url=url))

    parameters = app.backend.connparams
    assert parameters["ssl_cert_reqs"] == 2
    assert (parameters["db"], parameters["username"]) == (2, "user")
    assert "secret" not in app.backend.as_uri()


def test_an_absent_result_server_is_named_when_the_time_is_over() -> None:
    infer = register(make_app(Settings(broker_url="redis://127.0.0.1:1/0")))
    began = time.monotonic()

    with pytest.raises(CeleryTimeoutError, match=r"cannot be reached.*refused"):
        infer.AsyncResult("x").get(timeout=1)

    assert time.monotonic() - began < 3


def test_refused_credentials_end_a_wait_at_once(settings: Settings) -> None:
    url = settings.broker_url.replace("://", "://somebody:wrong@")
    infer = register(make_app(Settings(broker_url=url)))

    with pytest.raises(redis.AuthenticationError):
        infer.AsyncResult("x").get(timeout=20)


@pytest.mark.parametrize(
    ("grouped", "says"),
    [
        (False, ("The result is not there", "Its job waits, runs, or is lost")),
        (True, ("2 results are not there", "Their jobs wait, run, or are lost")),
    ],
)
def test_a_result_that_never_comes_ends_by_the_default(
    settings: Settings, grouped: bool, says: tuple[str, str]
) -> None:
    app = make_app(dataclasses.replace(settings, reply_timeout_s=0.3))
    infer = register(app)
    jobs = [infer.delay("digits", {"image": ROW}) for _ in range(2)]
    result = GroupResult("both", jobs, app=app) if grouped else jobs[0]

    wait = r" after 0\.3 s \(FLEET_REPLY_TIMEOUT_S\)\. "
    with pytest.raises(CeleryTimeoutError, match=rf"{wait.join(says)}.*math\.inf"):
        result.get()

    infer.publisher.close()
    app.backend.waiter.close()
    app.close()


def test_news_of_a_group_renew_its_default(settings: Settings, client: Any) -> None:
    app = make_app(dataclasses.replace(settings, reply_timeout_s=2))
    infer = register(app)
    group_of_four = GroupResult("four", [infer.AsyncResult(f"{i}") for i in range(4)], app=app)

    def answer() -> None:
        for i in range(4):
            time.sleep(0.6)
            store_result(app, client, f"{i}", states.SUCCESS, i)

    thread = threading.Thread(target=answer)
    thread.start()

    assert group_of_four.get() == [0, 1, 2, 3]
    thread.join()
    app.backend.waiter.close()
    app.close()


def test_a_wait_without_end_is_asked_for(infer: Infer, app: FleetApp, client: Any) -> None:
    result = infer.AsyncResult("late")
    thread = threading.Timer(0.3, store_result, (app, client, "late", states.SUCCESS, 7))
    thread.start()

    assert result.get(timeout=math.inf) == 7
    thread.join()


def results_alive() -> int:
    # By type alone: isinstance() would ask proxies for what they stand for.
    return sum(issubclass(type(each), JobResult) for each in gc.get_objects())


def test_a_wait_that_ended_leaves_nothing(infer: Infer, app: FleetApp, client: Any) -> None:
    for _ in range(3):
        with pytest.raises(CeleryTimeoutError):
            infer.AsyncResult("never").get(timeout=0.05)
    gc.collect()
    connections, results = len(client.client_list()), results_alive()
    channels = set(client.pubsub_channels())

    for _ in range(20):
        with pytest.raises(CeleryTimeoutError):
            infer.AsyncResult("never").get(timeout=0.01)

    gc.collect()
    assert results_alive() <= results
    assert set(client.pubsub_channels()) <= channels
    # Those of tests before may go meanwhile, and a server sees a moment later that one is closed.
    wait_until(lambda: len(client.client_list()) <= connections, what="no connection more")


def test_a_dropped_result_costs_no_word_to_redis(infer: Infer, client: Any) -> None:
    results = [infer.AsyncResult(f"{i}") for i in range(10)]
    gc.collect()
    client.config_resetstat()

    del results
    gc.collect()

    assert not {"cmdstat_unsubscribe", "cmdstat_subscribe"} & client.info("commandstats").keys()


def test_any_number_of_threads_waits_at_once(infer: Infer, app: FleetApp, client: Any) -> None:
    ids = [f"one-of-many-{i}" for i in range(MANY_THREADS)]
    with ThreadPoolExecutor(MANY_THREADS) as threads:
        waits = [threads.submit(infer.AsyncResult(job_id).get, timeout=20) for job_id in ids]
        wait_until(
            lambda: len(client.pubsub_channels("*one-of-many*")) == MANY_THREADS,
            what="each thread's subscription",
        )
        for number, job_id in enumerate(ids):
            store_result(app, client, job_id, states.SUCCESS, number)

        assert [wait.result() for wait in waits] == list(range(MANY_THREADS))

    store_result(app, client, "after them", states.SUCCESS, 7)
    assert infer.AsyncResult("after them").get(timeout=1) == 7
    wait_until(
        lambda: (
            sum(each["cmd"] == "unsubscribe" for each in client.client_list()) < MANY_THREADS / 2
        ),
        what="most of the subscriptions to be closed",
    )


def test_a_forked_child_waits_on_connections_of_its_own(
    infer: Infer, app: FleetApp, client: Any, worker: Worker
) -> None:
    assert infer.delay("digits", {"i": 1}).get(timeout=5) == {"i": 1}
    with pytest.raises(CeleryTimeoutError):
        infer.AsyncResult("never").get(timeout=0.05)

    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if infer.delay("digits", {"i": 2}).get(timeout=5) == {"i": 2} else 2)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert infer.delay("digits", {"i": 3}).get(timeout=5) == {"i": 3}
