"""What `fleet dead show` says of a job's inputs: their form, and values only where they are asked
for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import redis
from celery import Celery
from click.testing import CliRunner

from producer.cli import cli
from producer.client import Client
from producer.contract.app import make_app
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings
from tests.support.servers import TestServer

pytestmark = pytest.mark.redis

KEYS = Keys()
QUEUE = "fleet.digits"


@pytest.fixture
def sender(client: redis.Redis, server: TestServer) -> Iterator[Celery]:
    """Return an app on the transport of the fleet that has no task of ours."""
    with make_app(Settings(broker_url=server.url)) as app:
        yield app


def buried(client: redis.Redis) -> str:
    """Bury the one job that waits, as a worker does; return its id."""
    (stream,) = (each for each in KEYS.streams(QUEUE) if client.xlen(each))
    entries: Any = client.xrange(stream)
    ((entry, fields),) = entries
    original: dict[Any, Any] = {b"original:" + name: value for name, value in fields.items()}
    job_id = fields[b"id"].decode()
    client.xadd(KEYS.dead(QUEUE), {"job": job_id, "stream": stream, **original})
    client.xdel(stream, entry)
    return str(job_id)


def shown(server: TestServer, *words: str) -> str:
    result = CliRunner().invoke(cli, ["dead", *words], env={"FLEET_BROKER_URL": server.url})
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def test_inputs_are_shown_by_name_dtype_and_shape(
    server: TestServer, client: redis.Redis, fleet: Client
) -> None:
    inputs = {"image": np.full((2, 1, 8, 8), 7.25, "float32"), "note": "canary", "n": 12345}
    fleet.submit("digits", inputs)
    job = buried(client)

    text = shown(server, "show", job)
    (said,) = json.loads(shown(server, "show", job, "--json"))

    assert said["inputs"] == {"image": "float32[2, 1, 8, 8]", "note": "str[6]", "n": "int"}
    assert "image: float32[2, 1, 8, 8]" in text
    for word in ("canary", "12345", "7.25"):
        assert word not in text + json.dumps(said)


def test_what_celery_wrote_of_the_arguments_is_not_shown(
    server: TestServer, client: redis.Redis, sender: Celery
) -> None:
    """Its text of a task that it does not know holds the values."""
    image = [[[[0.5] * 8] * 8]]
    sender.send_task("fleet.infer", ["digits", {"image": image, "note": "canary"}], queue=QUEUE)
    job = buried(client)

    outputs = [shown(server, "show", job), shown(server, "list"), shown(server, "list", "--json")]
    (said,) = json.loads(shown(server, "show", job, "--json"))

    assert all("canary" not in each and "0.5" not in each for each in [*outputs, json.dumps(said)])
    assert said["inputs"] == {"image": "list[1, 1, 8, 8] of float", "note": "str[6]"}


def test_short_values_are_shown_to_whoever_asks(
    server: TestServer, client: redis.Redis, fleet: Client
) -> None:
    inputs = {"row": np.arange(3, dtype="int64"), "note": "canary\x1b[2J", "text": "x" * 1000}
    inputs |= {"large": np.zeros((200, 200))}
    fleet.submit("digits", inputs)
    job = buried(client)

    (said,) = json.loads(shown(server, "show", job, "--values", "--json"))
    text = shown(server, "show", job, "--values")

    assert said["inputs"]["large"] == "float64[200, 200]"
    assert json.loads(said["values"]["row"]) == [0, 1, 2]
    assert json.loads(said["values"]["note"]) == "canary\x1b[2J"
    assert (said["values"]["text"], said["values"]["large"]) == (None, None)
    assert "row: [0, 1, 2]" in text
    assert "\x1b" not in text


def test_an_entry_that_nobody_can_read_says_so(server: TestServer, client: redis.Redis) -> None:
    client.xadd(KEYS.stream(QUEUE, Priority.NORMAL), {"id": "j", "env": b"canary", "body": b"\x00"})
    job = buried(client)

    (said,) = json.loads(shown(server, "show", job, "--values", "--json"))

    assert (said["inputs"], said["readable"]) == (None, False)
    assert "cannot be read" in said["unreadable"]
    assert "canary" not in json.dumps(said)
