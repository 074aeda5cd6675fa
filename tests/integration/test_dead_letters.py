"""Dead letters as a person meets them: why, how often, from whom, never what was in them; and
what becomes of those that he requeues or purges.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from celery.result import AsyncResult
from celery.utils.nodenames import anon_nodename
from click.testing import CliRunner, Result

from producer.cli import cli
from producer.client import Client, Job
from producer.contract.app import make_app
from producer.contract.errors import BadMessage, FleetError, WorkerLost
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings
from producer.tasks import register
from tests.support.engines import Do, row, starts
from tests.support.servers import TestServer, running_server
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker

MODEL = "scripted"
QUEUE = f"fleet.{MODEL}"
KEYS = Keys()

#: Poison kills one process and no more, where it is the letter that counts.
ONCE = {"FLEET_MAX_ATTEMPTS": "1"}


def fleet_command(server: TestServer, *arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(cli, arguments, env={"FLEET_BROKER_URL": server.url, **environ})


def error_of(job: Job) -> FleetError:
    with pytest.raises(FleetError) as caught:
        job.reply(30)
    return caught.value


def wait_letters(client: redis.Redis, count: int) -> None:
    wait_until(
        lambda: client.xlen(KEYS.dead(QUEUE)) == count, what=f"{count} letters", timeout_s=40
    )


@pytest.fixture
def cause(tmp_path: Path) -> Path:
    """Return a file; once it is there, poison does no harm any more."""
    return tmp_path / "mended"


@pytest.fixture
def config(log: Path, cause: Path) -> Iterator[Path]:
    options = {"log": str(log), "harmless_while": str(cause)}
    with config_folder({MODEL: {**SCRIPTED, "options": options}}) as folder:
        yield folder


def test_there_are_none_at_first(server: TestServer, client: redis.Redis) -> None:
    assert fleet_command(server, "dead", "list").output == "No dead letters.\n"
    assert fleet_command(server, "dead", "show", "nosuch").exit_code == 2
    assert fleet_command(server, "dead", "requeue", "--all").output == "No dead letters requeued.\n"
    assert fleet_command(server, "dead", "purge", "--all").exit_code == 0


def test_a_dead_letter_says_why_and_not_what(
    server: TestServer, client: redis.Redis, fleet: Client, config: Path
) -> None:
    raw: Any = {"hello": "secret canary"}
    with running_worker(server, config):
        poison = fleet.submit(MODEL, {"x": row(Do.KILL, job=1)})
        client.xadd(KEYS.stream(QUEUE, Priority.NORMAL), raw)
        told = str(error_of(poison))
        wait_letters(client, 2)

    listed = json.loads(fleet_command(server, "dead", "list", "--json").output)
    shown = fleet_command(server, "dead", "show", poison.id)
    table = fleet_command(server, "dead", "list")

    by_code = {letter["code"]: letter for letter in listed}
    assert by_code["WORKER_LOST"]["job_id"] == poison.id
    assert by_code["WORKER_LOST"]["attempts"] == 3
    assert by_code["WORKER_LOST"]["model"] == MODEL
    assert by_code["BAD_MESSAGE"]["job_id"] == ""
    assert by_code["BAD_MESSAGE"]["sizes_bytes"] == {"hello": 13}
    assert f"fleet dead show {poison.id}" in told
    longest = "large_arrays_bytes"
    assert f"{longest}  0\n" in shown.output
    assert f"{'code':<{len(longest)}}  WORKER_LOST\n" in shown.output
    assert poison.id in table.output
    for said in (json.dumps(listed), shown.output, table.output):
        assert "canary" not in said


def test_a_dead_letter_of_a_stock_app_says_who_sent_it_and_not_what(
    server: TestServer, client: redis.Redis, config: Path
) -> None:
    with Celery(broker=server.url, set_as_current=False) as stock:
        args = [MODEL, {"x": "secret canary"}]
        stock.send_task("fleet.infer", args=args, queue=QUEUE, task_id="j", compression="gzip")
    with running_worker(server, config):
        wait_letters(client, 1)

    (letter,) = json.loads(fleet_command(server, "dead", "list", "--json").output)

    assert (letter["job_id"], letter["code"], letter["readable"]) == ("j", "BAD_MESSAGE", True)
    assert letter["origin"] == anon_nodename()
    assert letter["sizes_bytes"].keys() == {"id", "rows", "raw"}
    assert "canary" not in json.dumps(letter)


def test_a_requeued_job_is_answered_once_its_cause_is_gone(
    server: TestServer, client: redis.Redis, config: Path, log: Path, cause: Path
) -> None:
    settings = Settings(broker_url=server.url)
    app = make_app(settings)
    with running_worker(server, config, environ=ONCE), Client(settings) as fleet:
        read = fleet.submit(MODEL, {"x": row(Do.KILL, job=1)}, priority="high")
        unread = register(app).delay(MODEL, {"x": row(Do.KILL, job=2)})
        # The failure of the first is read and fenced, that of the second lies under its key.
        assert isinstance(error_of(read), WorkerLost)
        wait_letters(client, 2)
        cause.touch()

        by_name = fleet_command(server, "dead", "requeue", read.id)
        every = fleet_command(server, "dead", "requeue", "--all", "--queue", MODEL, "--json")
        replies = {
            job.id: job.reply(0) for job in fleet.as_completed([read.id, unread.id], timeout_s=20)
        }

    assert by_name.output == "1 dead letter requeued.\n"
    assert by_name.exit_code == every.exit_code == 0
    (requeued,) = json.loads(every.output)["requeued"]
    assert requeued["job_id"] == unread.id
    assert {reply.attempts for reply in replies.values()} == {1}
    assert starts(log) == {1: 2, 2: 2}
    assert client.xlen(KEYS.dead(QUEUE)) == 0
    assert client.hlen(KEYS.journal(QUEUE)) == 0


def test_celerys_own_result_of_a_requeued_job_is_the_new_one(
    server: TestServer, client: redis.Redis, config: Path, cause: Path
) -> None:
    app = make_app(Settings(broker_url=server.url))
    with running_worker(server, config, environ=ONCE):
        poison = register(app).delay(MODEL, {"x": row(Do.KILL, job=1)})
        with pytest.raises(WorkerLost):
            poison.get(timeout=30)
        wait_letters(client, 1)
        cause.touch()

        fleet_command(server, "dead", "requeue", poison.id)

        assert AsyncResult(poison.id, app=app).get(timeout=20)["y"].tolist() == [[22, 0, 2]]


def test_a_job_whose_cause_is_still_there_becomes_a_dead_letter_again(
    server: TestServer, client: redis.Redis, fleet: Client, config: Path, log: Path
) -> None:
    with running_worker(server, config, environ=ONCE):
        poison = fleet.submit(MODEL, {"x": row(Do.KILL, job=1)})
        error_of(poison)
        wait_letters(client, 1)

        fleet_command(server, "dead", "requeue", poison.id)
        (again,) = fleet.as_completed([poison.id], timeout_s=40)

        assert isinstance(error_of(again), WorkerLost)
        wait_letters(client, 1)

    assert starts(log) == {1: 2}


def test_what_nobody_can_read_may_be_requeued_and_is_buried_again(
    server: TestServer, client: redis.Redis, config: Path
) -> None:
    raw: Any = {"id": "unreadable", "env": "x", "body": "y"}
    with running_worker(server, config), Client(Settings(broker_url=server.url)) as fleet:
        client.xadd(KEYS.stream(QUEUE, Priority.NORMAL), raw)
        client.xadd(KEYS.stream(QUEUE, Priority.NORMAL), {"hello": "world"})
        wait_letters(client, 2)
        before = {letter["letter_id"] for letter in letters(server)}

        result = fleet_command(server, "dead", "requeue", *before)
        wait_until(
            lambda: len(before ^ {letter["letter_id"] for letter in letters(server)}) == 4,
            what="two new letters in place of the old",
        )
        (job,) = fleet.as_completed(["unreadable"], timeout_s=10)

    assert result.exit_code == 0
    assert isinstance(error_of(job), BadMessage)


def letters(server: TestServer) -> list[dict[str, Any]]:
    return list(json.loads(fleet_command(server, "dead", "list", "--json").output))


def test_a_full_server_requeues_and_answers(
    server: TestServer, client: redis.Redis, config: Path, cause: Path
) -> None:
    app = make_app(Settings(broker_url=server.url))
    with running_worker(server, config, environ=ONCE):
        poison = register(app).delay(MODEL, {"x": row(Do.KILL, job=1)})
        wait_letters(client, 1)
        cause.touch()
        client.config_set("maxmemory", 1)
        try:
            result = fleet_command(server, "dead", "requeue", poison.id)
            poison.get(timeout=20)
        finally:
            client.config_set("maxmemory", 0)

    assert result.exit_code == 0


def test_a_requeued_job_is_answered_where_results_have_a_server_of_their_own(
    server: TestServer, client: redis.Redis, config: Path, cause: Path
) -> None:
    with running_server() as apart:
        settings = Settings(broker_url=server.url, result_url=apart.url)
        environ = {"FLEET_RESULT_URL": apart.url, **ONCE}
        with running_worker(server, config, environ=environ), Client(settings) as fleet:
            poison = fleet.submit(MODEL, {"x": row(Do.KILL, job=1)})
            error_of(poison)
            left = register(make_app(settings)).delay(MODEL, {"x": row(Do.KILL, job=2)})
            wait_letters(client, 2)
            cause.touch()

            result = fleet_command(server, "dead", "requeue", poison.id, left.id, **environ)
            done = list(fleet.as_completed([poison.id, left.id], timeout_s=20))

        assert result.exit_code == 0
        assert [job.reply(0).attempts for job in done] == [1, 1]


def test_what_cannot_be_requeued_is_one_line_and_the_others_are(
    server: TestServer, client: redis.Redis
) -> None:
    stream = KEYS.stream(QUEUE, Priority.NORMAL)
    good = {"stream": stream, "original:id": "x"}
    written: list[Any] = [{"job": "empty", "stream": stream}, {"job": "good", **good}]
    written += [{"job": "twice", **good}] * 2
    for fields in written:
        client.xadd(KEYS.dead(QUEUE), fields)

    result = fleet_command(server, "dead", "requeue", "empty", "good", "nosuch", "twice")
    as_json = fleet_command(server, "dead", "requeue", "--all", "--json")

    assert result.exit_code == as_json.exit_code == 2
    assert result.stdout == "1 dead letter requeued.\n"
    assert result.stderr.count("\n") == 1
    for reason in ("nosuch: there is no such", "entry had been deleted", "twice: 2 dead letters"):
        assert reason in result.stderr
    said = json.loads(as_json.stdout)
    assert [each["job_id"] for each in said["requeued"]] == ["twice"]
    assert len(said["refused"]) == 2
    assert client.xlen(stream) == 2


@pytest.mark.parametrize("command", ["requeue", "purge"])
@pytest.mark.parametrize("arguments", [[], ["--all", "some-job"]])
def test_a_command_that_does_not_say_which_letters_it_means_is_refused(
    server: TestServer, client: redis.Redis, command: str, arguments: list[str]
) -> None:
    result = fleet_command(server, "dead", command, *arguments)

    assert result.exit_code == 2
    assert "--all" in result.stderr


def test_a_purge_asks_for_a_yes_and_takes_one_queue(
    server: TestServer, client: redis.Redis
) -> None:
    for queue in (QUEUE, QUEUE, "fleet.other"):
        client.xadd(KEYS.dead(queue), {"job": "some-job"})

    refused = fleet_command(server, "dead", "purge", "--all")
    purged = fleet_command(server, "dead", "purge", "--all", "--queue", QUEUE, "--yes")

    assert refused.exit_code == 2
    assert "deletes 3 dead letters" in refused.stderr
    assert purged.output == "2 dead letters purged.\n"
    assert client.xlen(KEYS.dead("fleet.other")) == 1
