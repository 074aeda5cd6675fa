"""Redis fails in the middle of a cycle: replies that are made then are waited for before process
and Redis tell each other what is whose, and no start counts that came to nothing. And a hook that
never returns, behind an engine that takes longer than was expected.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from producer.client import Client, Job
from producer.contract.errors import FleetError
from producer.contract.settings import Settings
from tests.support.engines import row, starts
from tests.support.proxy import Proxy, running_proxy
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker
from workers.delivery.scripts import BEGIN

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

TOLD, PLAIN = "told", "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """A worker with two models, of which one has code around it; only the worker, not the client,
    reaches Redis through a proxy.
    """

    server: TestServer
    config: Path
    client: Client
    worker: Worker
    proxy: Proxy
    #: No run of a numbered job ends while it is there.
    held: Path
    #: The starts of jobs, and of hooks.
    starts: Path
    hooks: Path

    def learn(self) -> None:
        """Let the worker learn how long a batch takes."""
        for _ in range(2):
            self.client.submit(TOLD, {}).reply(20)

    def send(self, **told: Any) -> list[Job]:
        """Send a job with code around it, and one without, which is begun while the reply of the
        other is made; its id is `second`.
        """
        self.learn()
        self.held.touch()
        first = self.client.submit(TOLD, {**told, "job": 1, "log": str(self.hooks)})
        wait_until(lambda: starts(self.starts).get(1), what="the first start")
        second = self.client.submit(PLAIN, {"x": row(job=2)}, job_id="second")
        self.held.unlink()
        return [first, second]

    def drain_at_begin(self, job_id: bytes, then: Callable[[], object]) -> list[bytes]:
        """Tell the worker to end while it waits for the answer to the begin of a job, and do
        ``then`` before Redis hears of that; what is returned is empty until it was so.
        """
        begins: list[bytes] = []

        def drain(request: bytes) -> None:
            if not begins and job_id in request and BEGIN.digest.encode() in request:
                begins.append(request)
                os.kill(self.worker.pid, signal.SIGTERM)
                wait_until(lambda: self.worker.status().get("state") == "draining", what="the end")
                then()

        self.proxy.before = drain
        return begins

    def wait_end(self) -> int:
        assert self.worker.process is not None
        return self.worker.process.wait(30)

    def made(self) -> int:
        """Return how often a reply was begun."""
        return self.hooks.read_text().count("behind")


@pytest.fixture
def fleet(server: TestServer, tmp_path: Path) -> Iterator[Fleet]:
    with server.client() as redis:
        redis.flushall()
    log, held = tmp_path / "starts.log", tmp_path / "held"
    options = {"log": str(log), "held_while": str(held)}
    plain = {**SCRIPTED, "max_batch_size": 1, "options": options}
    told = {**plain, "time_limit_s": 4, "code": "tests.support.hooks:Told"}
    with (
        config_folder({TOLD: told, PLAIN: plain}) as config,
        running_proxy(server.port) as proxy,
        running_worker(server, config, environ={"FLEET_BROKER_URL": proxy.url}) as worker,
        Client(Settings(broker_url=server.url)) as client,
    ):
        yield Fleet(
            server=server,
            config=config,
            client=client,
            worker=worker,
            proxy=proxy,
            held=held,
            starts=log,
            hooks=tmp_path / "hooks.log",
        )


def be_cut_off() -> None:
    raise ConnectionResetError


def test_a_start_counts_although_an_answer_of_redis_was_lost_while_it_ran(fleet: Fleet) -> None:
    fleet.proxy.swallow = b"second"

    first, second = fleet.send(behind="kill 1")

    with pytest.raises(FleetError, match="died 3 times") as told:
        first.reply(60)
    assert told.value.code == "WORKER_LOST"
    assert fleet.made() == 3
    assert second.reply(60).model == PLAIN


def test_a_reply_that_is_made_is_waited_for_when_redis_fails_on_drain(fleet: Fleet) -> None:
    begins = fleet.drain_at_begin(b"second", be_cut_off)

    first, second = fleet.send(behind="sleep 2")

    assert fleet.wait_end() == 0
    assert begins
    assert first.reply(5).attempts == 1
    with running_worker(fleet.server, fleet.config, node="w2"):
        assert second.reply(30).attempts == 1
    assert fleet.made() == 1


@pytest.mark.parametrize("model", [TOLD, PLAIN])
def test_on_drain_a_start_is_taken_back_that_only_redis_knows_of(fleet: Fleet, model: str) -> None:
    def lose_its_answer() -> None:
        fleet.proxy.swallow = b"unheard"

    begins = fleet.drain_at_begin(b"unheard", lose_its_answer)
    inputs = {"job": 3} if model == TOLD else {"x": row(job=3)}

    job = fleet.client.submit(model, inputs, job_id="unheard")

    assert fleet.wait_end() == 0
    assert begins
    with running_worker(fleet.server, fleet.config, node="w2"):
        assert job.reply(30).attempts == 1
    assert starts(fleet.starts) == {3: 1}


def test_a_hook_that_never_returns_ends_no_other_job(fleet: Fleet) -> None:
    fleet.learn()
    fleet.held.touch()
    first, endless = fleet.client.submit_many(
        TOLD, [{"job": 4}, {"before": "sleep 60", "log": str(fleet.hooks)}]
    )
    wait_until(fleet.hooks.exists, what="the hook, beside the engine")
    # Longer than what is ahead waits for an engine that should have been free.
    time.sleep(1)

    other = fleet.client.submit(TOLD, {"job": 5}, priority="high")
    fleet.held.unlink()

    assert [first.reply(30).attempts, other.reply(30).attempts] == [1, 1]
    with pytest.raises(FleetError) as told:
        endless.reply(30)
    assert told.value.code == "TIMEOUT"
