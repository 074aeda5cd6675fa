"""Dead letters as a person reads them: why, how often, from whom, never what was in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import redis
from click.testing import CliRunner, Result

from producer.cli import cli
from producer.client import Client
from producer.contract.errors import WorkerLost
from producer.contract.names import Keys, Priority
from tests.support.engines import Do, row
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker

MODEL = "scripted"


def fleet_command(server: TestServer, *arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, env={"FLEET_BROKER_URL": server.url})


def test_there_are_none_at_first(server: TestServer, client: redis.Redis) -> None:
    assert fleet_command(server, "dead", "list").output == "No dead letters.\n"
    assert fleet_command(server, "dead", "show", "nosuch").exit_code == 2


def test_a_dead_letter_says_why_and_not_what(
    server: TestServer, client: redis.Redis, fleet: Client, log: Path
) -> None:
    model = {**SCRIPTED, "options": {"log": str(log)}}
    raw: Any = {"hello": "secret canary"}
    with config_folder({MODEL: model}) as config, running_worker(server, config):
        poison = fleet.submit(MODEL, {"x": row(Do.KILL, job=1)})
        client.xadd(Keys().stream(f"fleet.{MODEL}", Priority.NORMAL), raw)
        try:
            poison.reply(30)
        except WorkerLost as error:
            told = str(error)
        wait_until(lambda: client.xlen(Keys().dead(f"fleet.{MODEL}")) == 2, what="both letters")

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
    assert "WORKER_LOST" in shown.output
    assert poison.id in table.output
    for said in (json.dumps(listed), shown.output, table.output):
        assert "canary" not in said
