"""Canvas of a stock Celery app: after its jobs its own tasks go on, on a worker of its own, and
nothing on either side of them knows the fleet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from producer.contract.names import Keys
from tests.support.engines import Do
from tests.support.servers import TestServer
from tests.support.stock import Stock
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def stock(server: TestServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    """Return the app; beside it run its own worker and one of the fleet."""
    with server.client() as client:
        client.flushall()
    app = Stock(tmp_path_factory.mktemp("stock"), server)
    with (
        config_folder({"scripted": {**SCRIPTED, "options": {}}}) as config,
        running_worker(server, config, node="canvas"),
        app.running_worker(),
    ):
        yield app


@pytest.fixture(autouse=True)
def settled(no_lasting_keys: None, stock: Stock, server: TestServer) -> Iterator[None]:
    """Let both workers put away what a test's last task and job have left to do."""
    yield
    with server.client() as client:
        wait_until(
            lambda: not client.keys("unacked*") and not client.keys("fleet:journal:*"),
            what="both workers to be done",
        )


@pytest.fixture
def broker(server: TestServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


def result_of(broker: redis.Redis, task_id: str) -> dict[str, Any]:
    """Return what is stored for a task or a job, once it is there."""
    key = Keys().result(task_id)
    stored: Any = wait_until(lambda: broker.get(key), what="a result")
    return dict(json.loads(stored))


def test_a_link_and_a_chain_go_on_with_the_apps_own_tasks(stock: Stock) -> None:
    job = 'infer({"x": [[0, 4, 0.5]]})'

    linked, chained, back = stock.ask(
        f"[outcome({job}.apply_async(link=total.s(), link_error=failed.s())), "
        f"outcome((row.s(0, 1, 2) | then_infer() | total.s()).delay()), "
        f"outcome(({job} | total.s() | row.s(2, 3) | then_infer()).delay())]"
    )

    assert linked["value"] == {"y": [[0, 8, 1]]}
    assert chained["value"] == 6
    assert back["value"] == {"y": [[18, 4, 6]]}


def test_an_answer_of_more_than_64_kib_goes_on_in_json(stock: Stock) -> None:
    said = stock.ask('outcome((infer({"x": [[0, 1, 0]] * 10000}) | total.s()).delay())')

    assert said["value"] == 20_000


def test_the_links_result_is_a_child_that_the_app_can_get(
    stock: Stock, broker: redis.Redis
) -> None:
    said = stock.ask('outcome(infer({"x": [[0, 4, 0.5]]}).apply_async(link=total.s()))')

    ((child, _), _) = result_of(broker, said["id"])["children"][0]
    assert result_of(broker, child)["result"] == 9


def test_a_link_waits_in_the_queue_that_its_signature_names(
    stock: Stock, broker: redis.Redis
) -> None:
    stock.ask('outcome(infer({"x": [[0, 4, 0.5]]}).apply_async(link=total.s().set(queue="mine")))')

    wait_until(lambda: broker.llen("mine") == 1, what="the link in its queue")
    broker.delete("mine")


def test_an_errback_gets_the_id_of_the_job(stock: Stock) -> None:
    said = stock.ask("outcome((infer({}) | total.s()).apply_async(link_error=failed.s()))")

    assert said["value"].startswith("BadRequest: BAD_REQUEST: ")
    assert len(stock.ask('noted("failed")')) == 1


def test_the_body_of_a_chord_runs_on_the_apps_own_worker(stock: Stock, broker: redis.Redis) -> None:
    jobs = [f'infer({{"x": [[{do}, 1, 0]]}})' for do in (Do.OK, Do.OK, Do.RAISE)]

    good, bad = stock.ask(
        f"[outcome(chord([{', '.join(jobs[:2])}])(total.s())), "
        f"outcome(chord([{', '.join(jobs)}])(total.s()))]"
    )

    assert good["value"] == 4
    assert "ENGINE_FAILED: " in bad["value"]
    stored = result_of(broker, bad["id"])
    assert (stored["status"], stored["result"]["exc_type"]) == ("FAILURE", "ChordError")
