"""Redis in trouble while hooks run beside the engine: what they worked on is dropped and given
back, they hold up no other job, and nothing is claimed before it is known what is ours.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from producer.client import Client, Job
from producer.contract.errors import JobTimeout
from producer.contract.names import Keys
from producer.contract.settings import Settings
from tests.support.engines import starts
from tests.support.proxy import Proxy, running_proxy
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = pytest.mark.redis

MODEL = "told"
TIME_LIMIT_S = 4.0


@pytest.fixture
def proxy(server: TestServer) -> Iterator[Proxy]:
    with server.client() as client:
        client.flushall()
    with running_proxy(server.port) as running:
        yield running


@pytest.fixture
def worker(server: TestServer, proxy: Proxy, tmp_path: Path) -> Iterator[Worker]:
    """A worker that reaches Redis through the proxy; its engine holds numbered jobs while there is
    a file ``held``, and it has one thread for `preprocess`.
    """
    options = {"log": str(tmp_path / "starts.log"), "held_while": str(tmp_path / "held")}
    model = {**SCRIPTED, "max_batch_size": 1, "time_limit_s": TIME_LIMIT_S}
    model |= {"code": "tests.support.hooks:Told", "options": options}
    with (
        config_folder({MODEL: model}) as config,
        running_worker(
            server, config, node="trouble", environ={"FLEET_BROKER_URL": proxy.url}
        ) as running,
    ):
        yield running


@pytest.fixture
def app(server: TestServer, worker: Worker) -> Iterator[Client]:
    with Client(Settings(broker_url=server.url)) as client:
        # Only behind a batch that should be short the next one is claimed.
        for _ in range(2):
            client.submit(MODEL, {}).reply(20)
        yield client


def there(folder: Path, *names: str) -> list[Path]:
    """Make files that the engine, or hooks, wait for to be gone."""
    paths = [folder / name for name in names]
    for path in paths:
        path.touch()
    return paths


def hooks_of(folder: Path) -> dict[int, int]:
    """Return how often `preprocess` was called for each numbered job."""
    lines = (line.split() for line in (folder / "hooks.log").read_text().splitlines())
    return collections.Counter(int(job) for when, job, _ in lines if when == "before")


def wait_hook(folder: Path, job: int) -> None:
    wait_until(
        lambda: (folder / "hooks.log").exists() and hooks_of(folder).get(job), what=f"hook {job}"
    )


def begun(server: TestServer) -> set[str]:
    """Return the ids of the jobs that were begun and have not ended."""
    with server.client() as client:
        found: Any = client.hkeys(Keys().journal(f"fleet.{MODEL}"))
    return {job_id.decode() for job_id in found}


def wait_trouble(worker: Worker) -> None:
    """Wait until the loop of the instance has found Redis away; its parent finds that, too."""
    wait_until(
        lambda: any(
            "redis.trouble" in line and "instance-0" in line for line in worker.log().splitlines()
        ),
        what="its trouble",
    )


def test_a_hook_that_never_returns_is_over_its_own_limit_when_its_batch_was_dropped(
    worker: Worker, app: Client, proxy: Proxy, tmp_path: Path
) -> None:
    log = {"log": str(tmp_path / "hooks.log")}
    engine, hook, made = there(tmp_path, "held", "hooked", "made")
    first, second, hung = app.submit_many(
        MODEL,
        [
            {**log, "behind": f"while {made}"},
            {**log, "job": 1},
            {**log, "job": 2, "before": f"while {hook}"},
        ],
    )
    # Of the three one is behind the engine, one in it, and of the last the hook runs.
    wait_hook(tmp_path, 2)
    after = app.submit(MODEL, {**log, "job": 3}, priority="high")
    proxy.refusing = True
    proxy.cut()
    made.unlink()
    wait_trouble(worker)
    proxy.refusing = False
    engine.unlink()

    assert after.reply(30).attempts == 1

    with pytest.raises(JobTimeout):
        hung.reply(30)
    assert [job.reply(20).attempts for job in (first, second)] == [1, 1]


def test_an_answer_that_redis_did_not_take_waits_for_no_hook_of_another_job(
    worker: Worker, app: Client, proxy: Proxy, tmp_path: Path
) -> None:
    log = {"log": str(tmp_path / "hooks.log")}
    engine, hook = there(tmp_path, "held", "hooked")
    first, hung = app.submit_many(
        MODEL, [{**log, "job": 1}, {**log, "job": 2, "before": f"while {hook}"}]
    )
    wait_hook(tmp_path, 2)
    proxy.refusing = True
    proxy.cut()
    # What runs ends, and is to be answered while the hook holds up what is next.
    engine.unlink()
    wait_trouble(worker)
    proxy.refusing = False

    assert first.reply(30).attempts == 1

    hook.unlink()
    assert hung.reply(30).attempts == 1


def test_a_hook_of_a_dropped_batch_does_not_hold_up_the_end_of_its_worker(
    server: TestServer, worker: Worker, app: Client, proxy: Proxy, tmp_path: Path
) -> None:
    log = {"log": str(tmp_path / "hooks.log")}
    engine, hook, made = there(tmp_path, "held", "hooked", "made")
    *_, hung = app.submit_many(
        MODEL,
        [
            {**log, "behind": f"while {made}"},
            {**log, "job": 1},
            {**log, "job": 2, "before": f"while {hook}"},
        ],
    )
    wait_hook(tmp_path, 2)
    proxy.refusing = True
    proxy.cut()
    made.unlink()
    wait_trouble(worker)
    proxy.refusing = False
    engine.unlink()
    # Redis is back, and the loop waits for the hook alone.
    wait_until(lambda: begun(server) == {hung.id}, what="the others' ends")
    began_s = time.monotonic()

    assert worker.stop() == 0

    assert time.monotonic() - began_s < TIME_LIMIT_S - 1
    assert begun(server) == set()


def test_nothing_is_claimed_beside_the_engine_before_it_is_known_what_is_ours(
    worker: Worker, app: Client, proxy: Proxy, tmp_path: Path
) -> None:
    log = {"log": str(tmp_path / "hooks.log")}
    engine, hook = there(tmp_path, "held", "hooked")
    jobs: list[Job] = app.submit_many(
        MODEL,
        [{**log, "job": 1}, {**log, "job": 2, "before": f"while {hook}"}, {**log, "job": 3}],
    )
    wait_hook(tmp_path, 2)
    wait_until(lambda: starts(tmp_path / "starts.log").get(1), what="its run")
    proxy.refusing = True
    proxy.cut()
    # The first ends, and its answer does not come through while the hook of the second runs.
    engine.unlink()
    wait_trouble(worker)
    proxy.refusing = False
    hook.unlink()

    assert [job.reply(30).attempts for job in jobs] == [1, 1, 1]

    assert hooks_of(tmp_path) == {1: 1, 2: 1, 3: 1}
