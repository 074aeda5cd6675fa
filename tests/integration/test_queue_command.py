"""`fleet queue` as people and programs meet it: what waits, who serves it, and what it says while
Redis is away.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import redis
from click.testing import CliRunner, Result

from producer.cli import cli
from producer.client import Client
from producer.contract.app import make_app
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings
from producer.tasks import register
from tests.support.engines import Do, row, starts
from tests.support.servers import TestServer, running_server
from tests.support.waiting import wait_until
from tests.support.worker import ROOT, running_worker

MODEL = "scripted"
QUEUE = f"fleet.{MODEL}"
KEYS = Keys()


def fleet_queue(server: TestServer, *arguments: str) -> Result:
    return CliRunner().invoke(
        cli, ["queue", *arguments], env={"FLEET_BROKER_URL": server.url, "COLUMNS": "160"}
    )


def seen(server: TestServer) -> dict[str, dict[str, Any]]:
    """Return what the command says for programs, by queue."""
    queues = json.loads(fleet_queue(server, "--json").output)["queues"]
    return {each["queue"]: each for each in queues}


@contextlib.contextmanager
def watching(
    server: TestServer, *options: str, out: int | IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "producer.cli", "queue", "--watch", "0.2", *options],
        cwd=ROOT,
        env={**os.environ, "FLEET_BROKER_URL": server.url, "TERM": "xterm", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)


def test_an_empty_fleet_says_what_to_start(server: TestServer, client: redis.Redis) -> None:
    result = fleet_queue(server)

    assert result.exit_code == 0
    assert "fleet worker" in result.output
    assert seen(server) == {}


def test_what_nobody_serves_waits_and_is_said_to(
    server: TestServer, client: redis.Redis, fleet: Client
) -> None:
    fleet.submit_many(MODEL, [{"x": row()}] * 3)
    client.xadd(KEYS.dead("fleet.buried"), {"job": "some-job"})
    client.xadd(KEYS.stream("fleet.emptied", Priority.LOW), {"id": "x"})
    client.xtrim(KEYS.stream("fleet.emptied", Priority.LOW), maxlen=0)

    found = seen(server)
    shown = fleet_queue(server).output

    assert set(found) == {QUEUE, "fleet.buried"}
    assert found[QUEUE]["waiting"] == 3
    assert found[QUEUE]["workers"] == 0
    assert found[QUEUE]["answered_per_s"] is None
    assert 0 <= found[QUEUE]["oldest_s"] < 10
    assert found["fleet.buried"]["dead"] == 1
    assert shown.count("nobody at the moment") == 2


def test_all_that_a_busy_queue_holds_is_counted(
    server: TestServer, client: redis.Redis, fleet: Client, config: Path, log: Path
) -> None:
    infer = register(make_app(Settings(broker_url=server.url)))
    with running_worker(server, config):
        fleet.submit(MODEL, {"x": row(Do.SLEEP, 3.0, job=1)})
        wait_until(lambda: starts(log), what="the start")
        jobs = fleet.submit_many(MODEL, [{"x": row()}] * 40)
        infer.apply_async((MODEL, {"x": row()}), countdown=600)

        busy = seen(server)[QUEUE]
        models = json.loads(
            CliRunner()
            .invoke(cli, ["models", "--json"], env={"FLEET_BROKER_URL": server.url})
            .output
        )
        for job in jobs:
            job.reply(20)
        idle = wait_until(
            lambda: now if (now := seen(server)[QUEUE])["answered_per_s"] else None,
            what="a rate",
        )
        client.delete(KEYS.delayed(QUEUE))

    assert busy["claimed"] >= 1
    assert busy["waiting"] + busy["claimed"] == models[MODEL]["queued"] == 41
    assert busy["delayed"] == 1
    assert busy["ready_instances"] == busy["workers"] == 1
    assert idle["waiting"] == idle["claimed"] == 0
    assert idle["oldest_s"] is None
    assert 0 < idle["answered_per_s"] <= 41


def test_a_watch_goes_on_while_redis_is_away_and_ends_well_with_ctrl_c(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with running_server() as own, said.open("wb") as out:
        with own.client() as client:
            client.xadd(KEYS.stream(QUEUE, Priority.NORMAL), {"id": "x"})
        with watching(own, out=out) as watch:
            wait_until(lambda: f"{QUEUE}  waiting 1, " in said.read_text(), what="a look")
            own.kill()
            wait_until(lambda: "Trying again" in said.read_text(), what="what is wrong")
            before = said.read_text().count(QUEUE)
            own.start()
            wait_until(lambda: said.read_text().count(QUEUE) > before, what="another look")

            watch.send_signal(signal.SIGINT)

            assert watch.wait(timeout=10) == 0
    assert "Traceback" not in said.read_text()


def test_a_watch_for_programs_is_a_line_of_json_a_look(
    server: TestServer, client: redis.Redis, tmp_path: Path
) -> None:
    client.xadd(KEYS.stream(QUEUE, Priority.NORMAL), {"id": "x"})
    said = tmp_path / "said"
    with said.open("wb") as out, watching(server, "--json", out=out):
        wait_until(lambda: said.read_text().count("\n") >= 3, what="three looks")

    looks = [json.loads(line) for line in said.read_text().splitlines()[:3]]
    assert [look["queues"][0]["waiting"] for look in looks] == [1, 1, 1]
    assert looks[0]["at_unix_s"] < looks[1]["at_unix_s"]


def test_on_a_terminal_a_watch_draws_over_what_it_drew(
    server: TestServer, client: redis.Redis
) -> None:
    client.xadd(KEYS.stream(QUEUE, Priority.NORMAL), {"id": "x"})
    ours, its = pty.openpty()
    try:
        with watching(server, out=its) as watch:
            drawn = b""
            while drawn.count(QUEUE.encode()) < 3:
                drawn += os.read(ours, 4096)

            watch.send_signal(signal.SIGINT)

            assert watch.wait(timeout=10) == 0
    finally:
        os.close(ours)
        os.close(its)
    # The cursor goes up between two tables.
    first, _, second = drawn.partition(QUEUE.encode())
    assert b"waiting" in first
    assert b"\x1b[1A" in second


def test_a_watch_of_an_absurd_pace_is_refused(server: TestServer) -> None:
    assert fleet_queue(server, "--watch", "0").exit_code == 2
