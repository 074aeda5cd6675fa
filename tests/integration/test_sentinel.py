"""Sentinels say where the master is, to a worker, an app and the commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from producer.client import Client
from producer.contract.settings import Settings, redis_client
from tests.support.app import fleet_app
from tests.support.commands import CELERY, FLEET, run_command
from tests.support.engines import row
from tests.support.sentinels import MASTER, Watched, watched_servers
from tests.support.worker import running_worker

pytestmark = [pytest.mark.redis, pytest.mark.timeout(90)]

#: Where nobody listens.
GONE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with watched_servers(sentinels=1) as running:
        yield running


def test_everybody_finds_the_master_though_the_first_sentinel_is_gone(
    watched: Watched, config: Path
) -> None:
    url = f"sentinel://{GONE},127.0.0.1:{watched.ports[0]}/{MASTER}/3"
    settings = Settings(broker_url=url)

    with (
        running_worker(watched.master(), config, environ={"FLEET_BROKER_URL": url}),
        Client(settings) as client,
        fleet_app(settings) as (_, infer),
    ):
        answer = infer.delay("scripted", {"x": row()}).get(timeout=20)
        by_kombu = infer.apply_async(("scripted", {"x": row()}), countdown=0.1).get(timeout=20)
        reply = client.submit("scripted", {"x": row()}).reply(timeout_s=20)
        status = run_command(*FLEET, "status", FLEET_BROKER_URL=url)
        # Named, it ends with the answer; a busy machine may need longer than the second by default.
        asked = (*CELERY, "inspect", "-d", "w1@test", "-t", "10", "ping")
        ping = run_command(*asked, FLEET_BROKER_URL=url)

    assert np.array_equal(answer["y"], reply.outputs["y"])
    assert np.array_equal(answer["y"], by_kombu["y"])
    assert "w1@test" in status.stdout, status.stderr
    assert "pong" in ping.stdout, ping.stderr
    with watched.master().client() as elsewhere:
        assert elsewhere.dbsize() == 0


def test_the_flower_page_is_read_from_the_master(watched: Watched) -> None:
    pytest.importorskip("flower")
    from workers.telemetry.flower_broker import FleetBroker

    rows = FleetBroker(Settings(broker_url=watched.url)).read({"fleet.scripted", "celery"})

    assert {line["name"] for line in rows} >= {"fleet.scripted", "celery"}


def test_the_master_and_the_sentinels_each_have_a_user_of_their_own(watched: Watched) -> None:
    with watched.master().client() as master, redis.Redis(port=watched.ports[0]) as sentinel:
        master.acl_setuser(
            "app", enabled=True, passwords=["+of-app"], keys=["*"], commands=["+@all"]
        )
        sentinel.execute_command(
            "ACL", "SETUSER", "asker", "on", ">of-asker", "+sentinel|get-master-addr-by-name"
        )
    place = f"127.0.0.1:{watched.ports[0]}/{MASTER}"

    right = f"sentinel://app:of-app@{place}?sentinel_username=asker&sentinel_password=of-asker"
    wrong = f"sentinel://app:of-app@{place}?sentinel_username=asker&sentinel_password=guessed"
    refused = run_command(*FLEET, "status", FLEET_BROKER_URL=wrong)

    with redis_client(right) as client:
        assert client.acl_whoami() == "app"
    assert refused.returncode == 2
    assert "guessed" not in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("place", "says"),
    [(f"{GONE}/{MASTER}", "Connection refused"), ("{sentinel}/another", "knows no master")],
)
def test_a_master_that_nobody_knows_is_refused_in_one_line(
    watched: Watched, place: str, says: str
) -> None:
    url = "sentinel://" + place.format(sentinel=f"127.0.0.1:{watched.ports[0]}")

    worker = run_command(*CELERY, "worker", "-n", "w1@test", FLEET_BROKER_URL=url)
    status = run_command(*FLEET, "status", FLEET_BROKER_URL=url)

    for ended in (worker, status):
        assert ended.returncode == 2
        assert len(ended.stderr.splitlines()) == 1
        assert says in ended.stderr
