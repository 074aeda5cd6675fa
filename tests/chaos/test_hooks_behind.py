"""What ends a process while it makes replies beside the engine's next batch, and what comes of
both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from producer.client import Client, Job
from producer.contract.app import make_app
from producer.contract.errors import FleetError
from producer.contract.names import Keys
from producer.contract.settings import Settings
from producer.tasks import register
from tests.support.engines import starts
from tests.support.proxy import running_proxy
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

MODEL = "told"
HOOKED = {**SCRIPTED, "max_batch_size": 1, "code": "tests.support.hooks:Told"}

Inputs: TypeAlias = Mapping[str, Any]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "starts.log"


@pytest.fixture
def fleet(server: TestServer) -> Iterator[Client]:
    with server.client() as client:
        client.flushall()
    with Client(Settings(broker_url=server.url)) as client:
        yield client


def model(log: Path, *, batch_s: float = 0.0, **settings: Any) -> dict[str, Any]:
    """Return a model whose engine takes so long for numbered jobs."""
    return {**HOOKED, **settings, "options": {"log": str(log), "batch_s": batch_s}}


def sent_after_known(fleet: Client, *inputs: Inputs) -> list[Job]:
    """Send jobs behind one that tells how long a batch takes; none is claimed before all wait."""
    return fleet.submit_many(MODEL, [{}, *inputs])[1:]


def ran(log: Path) -> list[int]:
    """Return how often `postprocess` was begun with each job that has a log."""
    return [int(line.split()[1]) for line in log.read_text().splitlines() if "behind" in line]


def journal(server: TestServer) -> dict[bytes, bytes]:
    with server.client() as client:
        return dict(client.hgetall(Keys().journal(f"fleet.{MODEL}")))


def test_a_reply_that_kills_its_process_is_a_dead_letter_and_the_next_batch_is_answered(
    server: TestServer, fleet: Client, log: Path
) -> None:
    poison, *others = sent_after_known(
        fleet, {"behind": "kill 0.3"}, *({"job": n} for n in range(1, 5))
    )
    with config_folder({MODEL: model(log, batch_s=0.2)}) as config, running_worker(server, config):
        with pytest.raises(FleetError) as told:
            poison.reply(60)
        attempts = [job.reply(60).attempts for job in others]

    assert told.value.code == "WORKER_LOST"
    assert starts(log)[1] == attempts[0] == 2
    assert max(attempts) == 2


def test_a_reply_over_its_time_limit_is_a_timeout_and_the_next_batch_is_answered(
    server: TestServer, fleet: Client, log: Path
) -> None:
    slow, *others = sent_after_known(
        fleet, {"behind": "sleep 60"}, *({"job": n} for n in range(1, 5))
    )
    told_model = model(log, batch_s=0.1, time_limit_s=1)
    with config_folder({MODEL: told_model}) as config, running_worker(server, config):
        with pytest.raises(FleetError) as told:
            slow.reply(60)
        attempts = [job.reply(60).attempts for job in others]

    assert told.value.code == "TIMEOUT"
    assert starts(log)[1] == attempts[0] == 2
    assert max(attempts) == 2


def test_a_batch_that_waits_for_the_replies_before_it_is_not_over_its_limit_for_that(
    server: TestServer, fleet: Client, log: Path
) -> None:
    infer = register(make_app(Settings(broker_url=server.url)))
    (slow,) = sent_after_known(fleet, {"behind": "sleep 3"})
    # A second is the least that a sender may give.
    strict = infer.apply_async((MODEL, {"job": 1}), time_limit=1)
    with config_folder({MODEL: model(log)}) as config, running_worker(server, config):
        wait_until(lambda: starts(log).get(1), what="the batch beside")
        assert not slow.done

        assert slow.reply(60).attempts == 1
        strict.get(timeout=20)

    assert starts(log) == {1: 1}


def test_on_drain_replies_are_made_and_what_runs_beside_them_is_answered(
    server: TestServer, fleet: Client, log: Path
) -> None:
    first, second, third = sent_after_known(
        fleet, {"behind": "sleep 1"}, {"job": 1, "behind": "sleep 0.2"}, {"job": 2}
    )
    with config_folder({MODEL: model(log, batch_s=0.3)}) as config:
        with running_worker(server, config) as worker:
            wait_until(lambda: starts(log).get(1), what="the batch beside")
            assert not first.done
            assert worker.stop() == 0

        assert [job.reply(5).attempts for job in (first, second)] == [1, 1]
        assert journal(server) == {}
        with running_worker(server, config, node="w2"):
            assert third.reply(30).attempts == 1
    assert starts(log) == {1: 1, 2: 1}


def test_starts_are_taken_back_when_the_grace_is_over_before_the_replies(
    server: TestServer, fleet: Client, log: Path, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    held.touch()
    jobs = sent_after_known(fleet, {"behind": f"while {held}"}, {"job": 1})
    with config_folder({MODEL: model(log)}) as config:
        with running_worker(server, config, environ={"FLEET_GRACE_S": "2"}) as worker:
            wait_until(lambda: starts(log).get(1), what="the batch beside")
            assert worker.stop() == 0
        assert journal(server) == {}
        held.unlink()

        with running_worker(server, config, node="w2"):
            assert [job.reply(30).attempts for job in jobs] == [1, 1]


def test_a_reply_of_redis_that_is_lost_meanwhile_runs_nothing_twice(
    server: TestServer, fleet: Client, log: Path, tmp_path: Path
) -> None:
    hooks = tmp_path / "hooks.log"
    inputs: list[Inputs] = [{"behind": "sleep 1.5", "log": str(hooks)}]
    inputs += [{"job": n, "log": str(hooks)} for n in (1, 2)]
    with running_proxy(server.port) as proxy:
        environ = {"FLEET_BROKER_URL": proxy.url}
        with (
            config_folder({MODEL: model(log, batch_s=0.4)}) as config,
            running_worker(server, config, environ=environ),
        ):
            jobs = fleet.submit_many(
                MODEL, [{}, *inputs], job_ids=["known", "first", "second", "third"]
            )[1:]
            # What begins it beside the engine is carried out, and nobody hears of that.
            proxy.swallow = b"third"

            replies = [job.reply(30) for job in jobs]
            was_lost = proxy.swallow is None

    assert was_lost
    assert [reply.attempts for reply in replies] == [1, 1, 1]
    assert sorted(ran(hooks)) == [0, 1, 2]
    assert starts(log) == {1: 1, 2: 1}
