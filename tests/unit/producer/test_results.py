"""``AsyncResult`` on the fleet's backend: Celery's format, errors as themselves, no hanging."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import redis
from celery import states
from celery.exceptions import TimeoutError as CeleryTimeoutError

from producer.contract import errors
from producer.contract.app import FleetApp, make_app
from producer.contract.settings import Settings
from producer.tasks import Infer, register
from tests.unit.producer.conftest import Worker, store_result

pytestmark = pytest.mark.redis

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

    assert infer.AsyncResult("there").get(timeout=1) == {"y": 1}
    assert app.backend.result_consumer._pubsub is None


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
    began = time.monotonic()

    with pytest.raises(CeleryTimeoutError):
        infer.AsyncResult("never").get(timeout=0.2)

    assert time.monotonic() - began < 0.6


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


def test_an_absent_result_server_fails_soon() -> None:
    infer = register(make_app(Settings(broker_url="redis://127.0.0.1:1/0")))
    began = time.monotonic()

    with pytest.raises((redis.ConnectionError, OSError, RuntimeError)):
        infer.AsyncResult("x").get(timeout=3)

    assert time.monotonic() - began < 5
