"""Large arrays in a bucket, through s3fs and a server that speaks S3: there, away, standing still,
closed to us.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.support.buckets import BUCKET, Buckets, running_buckets
from tests.support.queues import assert_all_ended
from tests.support.refusal import CELERY, refusal
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.wide_app import MODEL, WIDTH, answer_of, start_asking
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

JOBS: Final = 40


class Trouble(NamedTuple):
    """A way in which a bucket fails."""

    begins: Callable[[], contextlib.AbstractContextManager[None]]
    lasts_s: float


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buckets]:
    with running_buckets(tmp_path_factory.mktemp("buckets")) as running:
        yield running


@pytest.fixture(scope="module")
def config() -> Iterator[Path]:
    # Several batches that take their time, so that there is always one to be read.
    options = {"width": WIDTH, "batch_s": 0.2}
    wide = {**SCRIPTED, "max_batch_size": 2, "options": options}
    with config_folder({MODEL: wide}) as folder:
        yield folder


@pytest.fixture
def environ(broker: TestServer, buckets: Buckets) -> dict[str, str]:
    return {**buckets.environ, "FLEET_BROKER_URL": broker.url}


@pytest.fixture
def worker(broker: TestServer, config: Path, environ: dict[str, str]) -> Iterator[Worker]:
    with running_worker(broker, config, environ=environ) as running:
        yield running


def ask(buckets: Buckets, environ: dict[str, str], what: str, *arguments: object) -> Any:
    """Have the app do something; it never shows what it signs with."""
    said, wrote = answer_of(start_asking(what, *map(str, arguments), environ=environ))
    buckets.assert_no_secret_in(wrote)
    return said


def test_jobs_and_replies_go_through_a_bucket_and_leave_nothing_there(
    buckets: Buckets, environ: dict[str, str], worker: Worker
) -> None:
    said = ask(buckets, environ, "rounds", JOBS)

    print(f"{JOBS} jobs of 1 MiB, in and out: {said['took_s']:.1f} s")
    assert said["right"] == JOBS
    wait_until(lambda: not buckets.keys(), what="an empty bucket")
    buckets.assert_no_secret_in(worker.log())


def test_an_app_that_forks_uses_the_bucket_in_every_process(
    buckets: Buckets, environ: dict[str, str], worker: Worker
) -> None:
    assert ask(buckets, environ, "forked")["right"] == [True] * 4


def test_an_object_that_is_gone_costs_its_own_job_alone(
    broker: TestServer, buckets: Buckets, environ: dict[str, str], config: Path
) -> None:
    gone = ask(buckets, environ, "sent", 2)["ids"]
    buckets.delete_all()
    there = ask(buckets, environ, "sent", 1)["ids"]

    with running_worker(broker, config, environ=environ):
        lost = ask(buckets, environ, "got", *gone)["outcomes"]
        kept = ask(buckets, environ, "got", *there)["outcomes"]

    assert lost == ["ARRAY_MISSING"] * 2
    assert kept == [True]


@pytest.fixture(params=["away", "frozen"])
def trouble(request: pytest.FixtureRequest, buckets: Buckets) -> Trouble:
    """Each way in which a bucket fails, and for how long: one that stands still is waited for."""
    if request.param == "away":
        return Trouble(buckets.away, 5)
    return Trouble(buckets.frozen, 40)


def test_no_job_is_lost_that_is_sent_while_the_bucket_fails(
    broker: TestServer,
    buckets: Buckets,
    environ: dict[str, str],
    worker: Worker,
    trouble: Trouble,
) -> None:
    asked = start_asking("stubborn", str(JOBS), environ=environ)
    wait_until(lambda: worker.counters(MODEL).get("jobs"), what="the first jobs")
    pids = worker.instance_pids()
    with trouble.begins():
        time.sleep(trouble.lasts_s)
    said, wrote = answer_of(asked)

    print(f"{said['refusals']} refusals, the slowest send took {said['slowest_s']:.1f} s")
    assert said["right"] == JOBS
    assert said["slowest_s"] < 15
    assert worker.instance_pids() == pids
    assert_all_ended(broker, MODEL)
    buckets.assert_no_secret_in(wrote + worker.log())


def test_no_job_is_lost_that_a_worker_reads_while_the_bucket_fails(
    broker: TestServer,
    buckets: Buckets,
    environ: dict[str, str],
    config: Path,
    trouble: Trouble,
) -> None:
    ids = ask(buckets, environ, "sent", JOBS)["ids"]
    with running_worker(broker, config, environ=environ) as worker:
        wait_until(lambda: worker.counters(MODEL).get("jobs"), what="the first jobs")
        pids = worker.instance_pids()
        with trouble.begins():
            time.sleep(trouble.lasts_s)
            left = JOBS - worker.counters(MODEL)["jobs"]

        outcomes = ask(buckets, environ, "got", *ids)["outcomes"]

        print(f"{left} jobs waited; told of {worker.log().count('FLEET_BLOB_URL) failed')} times")
        assert left > 0
        assert outcomes == [True] * JOBS
        assert worker.instance_pids() == pids
        assert_all_ended(broker, MODEL)
        buckets.assert_no_secret_in(worker.log())


@pytest.mark.parametrize(
    "wrong",
    [
        {"AWS_ACCESS_KEY_ID": "AKIANOBODYNOBODYNOBO"},
        {"AWS_SECRET_ACCESS_KEY": "nothing-that-signs"},
        {"FLEET_BLOB_URL": "s3://misspelt/fleet"},
    ],
    ids=["key", "secret", "bucket"],
)
def test_a_bucket_that_is_closed_to_us_is_told_at_once_and_never_made(
    broker: TestServer,
    buckets: Buckets,
    environ: dict[str, str],
    config: Path,
    wrong: dict[str, str],
) -> None:
    environ = {**environ, **wrong}

    said = ask(buckets, environ, "refused")["error"]
    # It imports s3fs first.
    line = refusal(CELERY, server=broker, config=config, environ=environ, within_s=15)

    kind = "FileNotFoundError" if "FLEET_BLOB_URL" in wrong else "PermissionError"
    assert said == f"The folder or bucket of large arrays (FLEET_BLOB_URL) failed: {kind}."
    assert "FLEET_BLOB_URL cannot be used" in line
    assert kind in line
    assert not any(value in said + line for value in wrong.values())
    assert buckets.names() == [BUCKET]
