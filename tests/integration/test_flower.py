"""Flower itself over a real worker: closed without a password, and telling what happened with
it.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from producer.cli import cli
from producer.client import Client, Job
from producer.contract.errors import Cancelled, FleetError
from producer.contract.names import FREE, GROUP, Keys, Priority
from producer.contract.settings import Settings
from tests.support.engines import Do, row
from tests.support.flower import LOGIN, Flower, Json, running_flower
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytest.importorskip("flower")

pytestmark = [pytest.mark.redis, pytest.mark.timeout(90)]

#: Takes every batch.
MODEL = "scripted"
#: Has memory for four rows in fp32, so that a fuller batch is answered in fp16.
TIGHT = "tight"
#: A value that no shape, id or time has; it must appear on no page.
SECRET = 7.4321

#: One of every kind; those that Flower itself leaves open among them.
PAGES = (
    *("/", "/workers?json=1", "/worker/flower@test", "/tasks", "/task/x", "/broker"),
    *("/tasks/datatable?draw=1&start=0&length=10", "/api/workers", "/api/tasks"),
    *("/api/task/info/x", "/api/task/result/x", "/api/task/types", "/api/queues/length"),
    *("/metrics", "/healthcheck", "/login", "/nothing"),
)

JOBS, FAILING, CANCELLED, OUT_OF_MEMORY = 500, 5, 3, 20


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that holds the engine at a numbered job for as long as it is there."""
    return tmp_path_factory.mktemp("engine") / "held"


@pytest.fixture(scope="module")
def worker(server: TestServer, held: Path) -> Iterator[Worker]:
    with server.client() as client:
        client.flushall()
    model = {**SCRIPTED, "options": {"held_while": str(held)}}
    tight = {**SCRIPTED, "options": {"out_of_memory_above": {"fp32": 4}}}
    with (
        config_folder({MODEL: model, TIGHT: tight}) as config,
        running_worker(server, config, "--heartbeat-interval", "1", node="flower") as running,
    ):
        yield running


@pytest.fixture(scope="module")
def flower(
    server: TestServer, worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Flower]:
    folder = tmp_path_factory.mktemp("flower")
    with running_flower(server.url, folder, FLOWER_BASIC_AUTH=LOGIN) as running:
        wait_until(lambda: worker.node in running.workers(), what="a heartbeat in Flower")
        yield running


@pytest.fixture(autouse=True)
def late_answers_are_thrown_away(server: TestServer) -> Iterator[None]:
    """Flower asks workers eight things at once; kombu keeps an answer that comes too late."""
    yield
    with server.client() as client:
        for key in client.keys("*.reply.celery.pidbox"):
            client.delete(key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Story:
    """What was sent, how it ended, and what Flower showed on the way."""

    #: Ids by how the job ended: SUCCESS, FAILURE, REVOKED.
    ended: Mapping[str, set[str]]
    #: Answered after a lack of memory, as their replies say.
    out_of_memory: set[str]
    #: The broker page while a long batch held the instance up.
    queued: Mapping[str, Json]
    #: Flower's tasks by id, when all of them had ended.
    tasks: Mapping[str, Json]

    @property
    def ids(self) -> set[str]:
        return set().union(*self.ended.values())


@pytest.fixture(scope="module")
def story(server: TestServer, worker: Worker, flower: Flower, held: Path) -> Story:
    """Run 500 jobs behind one that holds the instance up, so that they wait and go in batches."""
    held.touch()
    with Client(Settings(broker_url=server.url)) as client:
        jobs = [client.submit(MODEL, {"x": row(job=1)})]
        wait_until(
            lambda: flower.queues()[f"fleet.{MODEL}"]["messages_unacknowledged"] == 1,
            what="the claim of the first job",
        )
        jobs += client.submit_many(TIGHT, [{"x": row()}] * OUT_OF_MEMORY)
        jobs += client.submit_many(MODEL, [{"x": row(Do.REFUSE)}] * (FAILING - 2))
        jobs += client.submit_many(MODEL, [{"wrong": row()}] * 2)
        jobs += (given_up := client.submit_many(MODEL, [{"x": row()}] * CANCELLED))
        for job in given_up:
            job.cancel()
        good = JOBS - len(jobs)
        jobs += client.submit_many(MODEL, [{"x": row(argument=SECRET)}] * good)
        queued = flower.queues()
        wait_until(lambda: flower.workers()[worker.node]["active"] == 1, what="one active job")
        held.unlink()
        ended, out_of_memory = _outcomes(jobs)
    tasks = wait_until(lambda: _ended_tasks(flower, ended), what="the end of every job in Flower")
    return Story(ended=ended, out_of_memory=out_of_memory, queued=queued, tasks=tasks)


def _outcomes(jobs: list[Job]) -> tuple[dict[str, set[str]], set[str]]:
    ended: dict[str, set[str]] = collections.defaultdict(set)
    out_of_memory = set()
    for job in jobs:
        try:
            reply = job.reply(timeout_s=30)
        except Cancelled:
            ended["REVOKED"].add(job.id)
        except FleetError:
            ended["FAILURE"].add(job.id)
        else:
            ended["SUCCESS"].add(job.id)
            if reply.out_of_memory:
                out_of_memory.add(job.id)
    return ended, out_of_memory


def _ended_tasks(flower: Flower, ends: Collection[str]) -> dict[str, Json] | None:
    """Return Flower's tasks by id once it knows all of them, and of each that it has ended."""
    tasks = dict(flower.json("/api/tasks"))
    known = len(tasks) >= JOBS and all(task["state"] in ends for task in tasks.values())
    return tasks if known else None


@pytest.mark.parametrize("path", PAGES)
def test_no_page_is_shown_without_the_password(flower: Flower, path: str) -> None:
    for login in (None, "someone:wrong", "someone:", ":"):
        status, text = flower.get(path, login)
        assert status == 401
        assert MODEL not in text

    assert flower.get(path)[0] != 401


def test_nothing_is_done_without_the_password(flower: Flower, worker: Worker) -> None:
    for path in (f"/api/worker/shutdown/{worker.node}", "/api/task/revoke/x"):
        assert flower.get(path, None, method="POST")[0] == 401


def test_counts_per_state_equal_the_results(story: Story) -> None:
    good = JOBS - FAILING - CANCELLED
    assert {state: len(ids) for state, ids in story.ended.items()} == {
        "SUCCESS": good,
        "FAILURE": FAILING,
        "REVOKED": CANCELLED,
    }
    shown: dict[str, set[str]] = collections.defaultdict(set)
    for job_id, task in story.tasks.items():
        shown[task["state"]].add(job_id)
    assert shown == story.ended


def test_an_answer_after_a_lack_of_memory_is_a_success_that_was_retried(story: Story) -> None:
    assert len(story.out_of_memory) == OUT_OF_MEMORY
    assert {job_id for job_id, task in story.tasks.items() if task["retried"]} == (
        story.out_of_memory
    )
    assert story.out_of_memory <= story.ended["SUCCESS"]


def test_a_task_has_its_model_worker_times_and_shapes(story: Story, worker: Worker) -> None:
    models = collections.Counter(task["name"] for task in story.tasks.values())
    assert models == {"fleet.infer.tight": OUT_OF_MEMORY, "fleet.infer.scripted": JOBS - 20}
    for job_id in story.ended["SUCCESS"]:
        task = story.tasks[job_id]
        assert task["worker"] == worker.node
        assert task["runtime"] > 0
        assert task["received"] <= task["started"] <= task["succeeded"]
        model = task["name"].removeprefix("fleet.infer.")
        assert task["args"] == f"('{model}', {{x: float32[1, 3]}})"
        assert task["result"] == "{y: float32[1, 3]}"
    for job_id in story.ended["FAILURE"]:
        assert story.tasks[job_id]["exception"]
    for job_id in story.ended["REVOKED"]:
        assert story.tasks[job_id]["revoked"]
        assert not story.tasks[job_id]["started"]


def test_the_worker_table_counts_what_was_done(
    story: Story, flower: Flower, worker: Worker
) -> None:
    shown = wait_until(
        lambda: seen if (seen := flower.workers()[worker.node])["active"] == 0 else None,
        what="a heartbeat without running jobs",
    )

    assert shown["status"] is True
    assert shown["task-received"] == JOBS
    assert shown["task-succeeded"] == JOBS - FAILING - CANCELLED
    assert shown["task-failed"] == FAILING
    assert shown["task-revoked"] == CANCELLED
    assert shown["task-retried"] == OUT_OF_MEMORY
    wait_until(
        lambda: flower.workers()[worker.node]["processed"] == JOBS,
        what=f"the number of jobs; the worker counts {worker.counters(MODEL)}",
    )


def test_the_broker_page_shows_what_waits(story: Story, flower: Flower) -> None:
    scripted, tight = story.queued[f"fleet.{MODEL}"], story.queued[f"fleet.{TIGHT}"]

    assert tight["messages_ready"] == tight["messages"] == OUT_OF_MEMORY
    assert scripted["messages"] == JOBS - OUT_OF_MEMORY
    assert scripted["messages_unacknowledged"] == 1
    assert scripted["messages_ready"] == scripted["messages"] - 1
    assert scripted["consumers"] == 1
    page = flower.page("/broker")
    assert f"fleet.{MODEL}" in page
    assert "a-password" not in page


def test_what_was_given_back_waits_again(
    flower: Flower, server: TestServer, client: redis.Redis
) -> None:
    """A queue that no worker serves any more, half of it in the hands of a dead instance."""
    keys, queue = Keys(), "fleet.left"
    stream = keys.stream(queue, Priority.NORMAL)
    client.zadd(keys.models, {"left": 2e10})
    ids: list[Any] = [client.xadd(stream, {"id": number}) for number in range(10)]
    client.xadd(keys.stream(queue, Priority.LOW), {"id": "low"})
    client.xgroup_create(stream, GROUP, id="0")
    client.xreadgroup(GROUP, "dead", {stream: ">"}, count=6)
    client.xclaim(stream, GROUP, FREE, 0, ids[:4])

    shown = flower.queues()[queue]
    command = CliRunner().invoke(cli, ["queue", "--json"], env={"FLEET_BROKER_URL": server.url})
    (same,) = [each for each in json.loads(command.output)["queues"] if each["queue"] == queue]

    assert same["waiting"] == shown["messages_ready"]
    assert same["claimed"] == shown["messages_unacknowledged"]
    assert shown["messages"] == 11
    assert shown["messages_unacknowledged"] == 2
    assert shown["messages_ready"] == 9
    assert shown["consumers"] == 0


def test_pages_of_a_task_and_of_the_worker_show_no_data(
    story: Story, flower: Flower, worker: Worker
) -> None:
    some = [next(iter(story.out_of_memory)), *sorted(story.ended["SUCCESS"])[:5]]
    pages = [flower.page(f"/task/{job_id}") for job_id in some]
    assert "Retried" in pages[0]
    table = "/tasks/datatable?draw=1&start=0&length=500&order[0][column]=0&columns[0][data]=name"
    pages += [flower.page(f"/worker/{worker.node}"), flower.page(table), flower.page("/metrics")]

    assert "fleet.infer.scripted" in pages[-2]
    assert not any(str(SECRET) in page for page in pages)
