"""Arrays of a megabyte through a real worker: beside the queue, there as long as they are needed,
and gone with their job.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import redis
from kombu.serialization import loads

from producer.client import Client, Job
from producer.contract.blobs import Blobs
from producer.contract.errors import ArrayMissing, Cancelled, Expired, Overloaded, WorkerLost
from producer.contract.memory import is_full
from producer.contract.names import Keys, Priority, queue_of
from producer.contract.settings import Settings
from producer.contract.wire import CONTENT_TYPE
from producer.dead import letters
from producer.requeue import Requeued, requeue
from tests.support.app import fleet_app, own_app
from tests.support.engines import Do, batches, starts
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import (
    SCRIPTED,
    Worker,
    config_folder,
    running_worker,
    standing_still,
)

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

Array = npt.NDArray[Any]

KEYS: Final = Keys()
MODEL: Final = "wide"
#: Floats of one row, which is so large.
WIDTH: Final = 262_144
ROW_BYTES: Final = 4 * WIDTH
#: What an app of its own takes.
SENT: Final = [CONTENT_TYPE]


def row(do: Do = Do.OK, argument: float = 0.0, job: int = 0) -> dict[str, Array]:
    """Return the inputs of one row of a megabyte."""
    wide = np.arange(WIDTH, dtype=np.float32).reshape(1, WIDTH)
    wide[0, :3] = (do, argument, job)
    return {"x": wide}


def blobs(client: redis.Redis) -> list[bytes]:
    """Return the keys of all large arrays."""
    return list(client.scan_iter(f"{KEYS.blob('')}*", count=1000))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wide")


@pytest.fixture(scope="module")
def wide_config(folder: Path) -> Iterator[Path]:
    options = {
        "log": str(folder / "starts.log"),
        "held_while": str(folder / "held"),
        "harmless_while": str(folder / "harmless"),
        "width": WIDTH,
    }
    model = {**SCRIPTED, "max_batch_bytes": 4 * ROW_BYTES + 65_536, "options": options}
    with config_folder({MODEL: model}) as config:
        yield config


@pytest.fixture(scope="module")
def worker(server: TestServer, wide_config: Path) -> Iterator[Worker]:
    with running_worker(server, wide_config, environ={"FLEET_MAX_ATTEMPTS": "2"}) as running:
        yield running


@pytest.fixture
def client(server: TestServer, worker: Worker) -> Iterator[redis.Redis]:
    """Return a client of the server that the worker stays on."""
    with server.client() as client:
        for key in blobs(client):
            client.delete(key)
        yield client


@pytest.fixture
def held(folder: Path) -> Iterator[Path]:
    """Let no batch end while the file is there."""
    file = folder / "held"
    file.touch()
    yield file
    file.unlink(missing_ok=True)


def hold_with(fleet: Client, folder: Path, job: int) -> Job:
    """Send a job that runs until the file is gone; returns when it runs."""
    holding = fleet.submit(MODEL, row(job=job))
    wait_until(lambda: job in starts(folder / "starts.log"), what="the job that holds")
    return holding


def test_a_megabyte_goes_there_and_back_and_nothing_of_it_is_left(
    fleet: Client, client: redis.Redis
) -> None:
    reply = fleet.submit(MODEL, row()).reply(timeout_s=30)

    np.testing.assert_array_equal(reply.outputs["y"], row()["x"] * 2)
    assert reply.outputs["y"].flags.writeable
    wait_until(lambda: not blobs(client), what="no array to be left")


def test_a_result_that_get_has_read_keeps_its_arrays_as_long_as_itself(
    server: TestServer, client: redis.Redis
) -> None:
    with fleet_app(Settings(broker_url=server.url)) as (_, infer):
        result = infer.delay(MODEL, row())
        answers = [result.get(timeout=30), infer.AsyncResult(result.id).get(timeout=30)]

        for answer in answers:
            np.testing.assert_array_equal(answer["y"], row()["x"] * 2)
        (left,) = blobs(client)
        assert client.ttl(left) >= client.ttl(KEYS.result(result.id))
        client.delete(left)
        with pytest.raises(ArrayMissing):
            infer.AsyncResult(result.id).get(timeout=30)


def test_a_result_that_is_forgotten_takes_its_arrays_along(
    server: TestServer, client: redis.Redis
) -> None:
    with fleet_app(Settings(broker_url=server.url)) as (_, infer):
        result = infer.delay(MODEL, row())
        result.get(timeout=30)
        assert blobs(client)

        result.forget()

    assert not blobs(client)
    assert not client.exists(KEYS.result(result.id))


def test_what_waits_is_small_and_its_array_may_wait_for_a_week(
    fleet: Client, client: redis.Redis, folder: Path, held: Path
) -> None:
    jobs = [hold_with(fleet, folder, 1)]

    jobs += [fleet.submit(MODEL, row(job=2), priority="low") for _ in range(2)]
    ttls_s = [client.ttl(key) for key in blobs(client)]
    waiting: Any = client.xrange(KEYS.stream(queue_of(MODEL), Priority.LOW))

    assert max(sum(map(len, fields.values())) for _, fields in waiting) < 3000
    assert len(ttls_s) == 3
    assert min(ttls_s) > 6 * 86_400
    held.unlink()
    for job in jobs:
        assert job.reply(timeout_s=30).model == MODEL


def test_a_batch_holds_as_many_megabytes_as_its_model_allows(
    fleet: Client, folder: Path, held: Path
) -> None:
    hold_with(fleet, folder, 3)
    before = len(batches(folder / "starts.log"))
    jobs = [fleet.submit(MODEL, row(job=100 + number)) for number in range(8)]
    held.unlink()

    for job in jobs:
        job.reply(timeout_s=30)

    assert max(batches(folder / "starts.log")[before:]) == 4


def test_a_job_whose_array_is_gone_ends_alone_with_an_error_that_says_so(
    fleet: Client, client: redis.Redis, worker: Worker, folder: Path, held: Path
) -> None:
    hold_with(fleet, folder, 4)
    before = set(blobs(client))
    with standing_still(worker):
        # Else it might be read ahead.
        unlucky = fleet.submit(MODEL, row(job=5), priority="low")
        (gone,) = set(blobs(client)) - before
        client.delete(gone)
    lucky = fleet.submit(MODEL, row(job=6), priority="low")
    held.unlink()

    with pytest.raises(ArrayMissing, match="FLEET_BLOB_TTL_S"):
        unlucky.reply(timeout_s=30)
    assert lucky.reply(timeout_s=30).model == MODEL


def test_a_job_sent_twice_under_one_id_has_its_array_until_it_has_run(
    fleet: Client, client: redis.Redis, folder: Path, held: Path
) -> None:
    holding = hold_with(fleet, folder, 7)

    first = fleet.submit(MODEL, row(job=8), job_id="twice")
    again = fleet.submit(MODEL, row(job=8), job_id="twice")
    held.unlink()

    np.testing.assert_array_equal(first.reply(timeout_s=30).outputs["y"], row(job=8)["x"] * 2)
    assert again.reply(timeout_s=30).outputs["y"].nbytes == ROW_BYTES
    holding.reply(timeout_s=30)
    wait_until(lambda: not blobs(client), what="no array to be left")
    assert starts(folder / "starts.log")[8] == 1


def test_a_job_that_kills_its_process_is_read_again_and_requeued_with_its_array(
    fleet: Client, client: redis.Redis, folder: Path
) -> None:
    poison = fleet.submit(MODEL, row(Do.KILL, job=9))
    with pytest.raises(WorkerLost):
        poison.reply(timeout_s=60)
    (letter,) = letters(client, KEYS, queue_of(MODEL))
    assert len(blobs(client)) == 1
    assert letter.about()["large_arrays_bytes"] == ROW_BYTES

    (folder / "harmless").touch()
    ends = [end for _, end in requeue(client, KEYS, [letter])]
    (done,) = fleet.as_completed([poison.id], timeout_s=30)
    (folder / "harmless").unlink()

    assert ends == [Requeued.REQUEUED]
    assert done.reply(timeout_s=1).outputs["y"].nbytes == ROW_BYTES
    wait_until(lambda: not blobs(client), what="no array to be left")


def test_a_task_of_the_apps_own_gets_the_array_itself(
    server: TestServer, client: redis.Redis
) -> None:
    with own_app(server.url) as (own, infer):
        link = own.tasks["own.total"].s()
        job = infer.apply_async((MODEL, row()), link=link)
        answer = job.get(timeout=30)
        sent: Any = wait_until(lambda: client.rpop("celery"), what="the link's message")
        message = json.loads(sent)

    body = base64.b64decode(message["body"])
    args, _, _ = loads(body, message["content-type"], message["content-encoding"], SENT)
    np.testing.assert_array_equal(args[0]["y"], row()["x"] * 2)
    np.testing.assert_array_equal(answer["y"], row()["x"] * 2)


def test_a_job_that_is_delayed_finds_its_array_when_it_is_due(
    server: TestServer, client: redis.Redis, held: Path
) -> None:
    with fleet_app(Settings(broker_url=server.url)) as (_, infer):
        sent_s = time.monotonic()
        delayed = infer.apply_async((MODEL, row(job=14)), countdown=1)
        (waiting,) = blobs(client)
        lasts_s = client.pttl(waiting) / 1000 + time.monotonic() - sent_s
        assert lasts_s >= 7 * 86_400
        held.unlink()
        assert delayed.get(timeout=30)["y"].nbytes == ROW_BYTES

    wait_until(lambda: len(blobs(client)) == 1, what="the reply's array alone to be left")


def test_a_full_server_takes_the_arrays_of_replies_and_refuses_those_of_jobs(
    fleet: Client, client: redis.Redis, folder: Path, held: Path
) -> None:
    holding = hold_with(fleet, folder, 12)
    before = blobs(client)
    client.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(Overloaded):
            fleet.submit(MODEL, row())
        assert blobs(client) == before
        held.unlink()
        assert holding.reply(timeout_s=30).outputs["y"].nbytes == ROW_BYTES
    finally:
        client.config_set("maxmemory", 0)


def test_a_job_whose_arrays_were_refused_is_refused_as_well(client: redis.Redis) -> None:
    spilled = Blobs.of(Settings()).pack(row())
    *_, send = Blobs.of(Settings()).commands(
        spilled, ["XADD", "fleet:stream:x", "*", "a", 1], ttl_s=9
    )

    with pytest.raises(redis.ResponseError) as refusal:
        client.execute_command(*send)

    assert is_full(refusal.value)
    assert not client.exists("fleet:stream:x")


@pytest.mark.parametrize("how", ["expired", "cancelled"])
def test_the_array_of_a_job_that_never_runs_goes_with_it(
    fleet: Client, client: redis.Redis, folder: Path, held: Path, how: str
) -> None:
    holding = hold_with(fleet, folder, 13)
    before = set(blobs(client))
    expires_s = 0.001 if how == "expired" else None
    job = fleet.submit(MODEL, row(), expires_s=expires_s, priority="low")
    (its,) = set(blobs(client)) - before
    if how == "cancelled":
        job.cancel()
    else:
        assert client.ttl(its) <= 60
    held.unlink()

    with pytest.raises(Expired if how == "expired" else Cancelled):
        job.reply(timeout_s=30)
    holding.reply(timeout_s=30)
    wait_until(lambda: not blobs(client), what="no array to be left")


def test_a_worker_without_the_folder_of_a_sender_says_so_and_goes_on(
    server: TestServer, fleet: Client, client: redis.Redis, worker: Worker, tmp_path: Path
) -> None:
    pids = worker.instance_pids()
    settings = Settings(broker_url=server.url, blob_url=tmp_path.as_uri())

    with Client(settings) as other, pytest.raises(ArrayMissing, match="FLEET_BLOB_URL"):
        other.submit(MODEL, row()).reply(timeout_s=30)

    assert fleet.submit(MODEL, row()).reply(timeout_s=30).model == MODEL
    assert worker.instance_pids() == pids
