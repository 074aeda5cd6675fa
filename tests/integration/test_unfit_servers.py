"""Servers that cannot carry jobs, or that keep from us whether they can: what each side says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from producer.cli import cli
from producer.client import Client
from producer.contract.app import make_app
from producer.contract.errors import ConfigError
from producer.contract.settings import Settings
from producer.tasks import register
from tests.support.engines import row
from tests.support.refusal import FLEET, refusal
from tests.support.servers import TestServer, running_server
from tests.support.waiting import wait_until
from tests.support.worker import running_worker
from workers import preflight
from workers.settings import WorkerSettings

pytestmark = pytest.mark.redis

INPUTS = {"x": row()}
SLOTS = range(16384)


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestServer]:
    """Run a cluster of one node that holds every slot, so that each single command works."""
    with running_server("--cluster-enabled", "yes") as node, node.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTS", *SLOTS)
        yield node


@pytest.fixture
def managed(client: redis.Redis, server: TestServer) -> Iterator[str]:
    """Return the URL of a user who may do everything that is not dangerous: no INFO, no CONFIG."""
    client.execute_command(
        *("ACL", "SETUSER", "app", "on", ">a-secret", "~*", "&*", "+@all", "-@dangerous")
    )
    yield server.url.replace("redis://", "redis://app:a-secret@")
    client.execute_command("ACL", "DELUSER", "app")
    client.config_set("maxmemory-policy", "noeviction")


def warnings(url: str) -> list[str]:
    return preflight.check(WorkerSettings(), Settings(broker_url=url))


@pytest.mark.scripts
def test_a_server_that_the_scripts_run_on_is_taken_without_a_word(server: TestServer) -> None:
    assert warnings(server.url) == []


def test_a_worker_refuses_a_cluster_in_one_line(cluster: TestServer, config: Path) -> None:
    line = refusal(FLEET, server=cluster, config=config)

    assert "is a Redis Cluster" in line
    assert "FLEET_BROKER_URL" in line


def test_a_worker_refuses_a_cluster_for_its_results(
    cluster: TestServer, server: TestServer
) -> None:
    settings = Settings(broker_url=server.url, result_url=cluster.url)

    with pytest.raises(ConfigError, match=r"Cluster.*FLEET_RESULT_URL"):
        preflight.check(WorkerSettings(), settings)


@pytest.mark.parametrize("command", [("status",), ("models",), ("dead", "list")])
def test_a_command_refuses_a_cluster_in_one_line(
    cluster: TestServer, command: tuple[str, ...]
) -> None:
    result = CliRunner().invoke(cli, command, env={"FLEET_BROKER_URL": cluster.url})

    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "is a Redis Cluster" in result.stderr


@pytest.mark.parametrize("slots", ["all here", "none served"])
def test_an_app_is_told_of_a_cluster_at_its_first_job(cluster: TestServer, slots: str) -> None:
    app = make_app(Settings(broker_url=cluster.url))
    infer = register(app)
    client = Client(Settings(broker_url=cluster.url))
    with cluster.client() as node:
        if slots == "none served":
            node.execute_command("CLUSTER", "DELSLOTS", *SLOTS)
        try:
            for send in (
                lambda: infer.delay("m", INPUTS),
                lambda: infer.apply_async(("m", INPUTS), compression=None),
                lambda: client.submit("m", INPUTS),
                lambda: client.submit_many("m", [INPUTS]),
            ):
                with pytest.raises(ConfigError, match="is a Redis Cluster"):
                    send()
            assert node.dbsize() == 0
        finally:
            if slots == "none served":
                node.execute_command("CLUSTER", "ADDSLOTS", *SLOTS)
    infer.publisher.close()
    app.close()
    client.close()


def test_a_server_that_knows_no_greeting_is_called_too_old() -> None:
    with (
        running_server("--rename-command", "HELLO", "") as old,
        pytest.raises(ConfigError, match=r"older than Redis 6\.0.* Valkey 8 and 9 are supported"),
    ):
        warnings(old.url)


def test_a_managed_server_that_hides_its_policy_is_taken_with_one_line(managed: str) -> None:
    (line,) = warnings(managed)

    assert "does not tell its maxmemory-policy" in line
    assert "a-secret" not in line


def test_a_policy_is_asked_for_twice(managed: str, client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "app", "+config|get")
    assert warnings(managed) == []
    client.config_set("maxmemory-policy", "allkeys-lru")

    with pytest.raises(ConfigError, match="noeviction"):
        warnings(managed)


@pytest.mark.scripts
def test_a_server_that_may_drop_results_is_warned_of(
    server: TestServer, client: redis.Redis
) -> None:
    client.config_set("maxmemory-policy", "volatile-ttl")
    try:
        (line,) = warnings(server.url)
    finally:
        client.config_set("maxmemory-policy", "noeviction")

    assert "volatile-ttl" in line


def test_a_worker_says_what_it_was_warned_of_and_works(
    server: TestServer, client: redis.Redis, managed: str, config: Path
) -> None:
    with (
        running_worker(server, config, environ={"FLEET_BROKER_URL": managed}) as worker,
        Client(Settings(broker_url=managed)) as fleet,
    ):
        fleet.submit("scripted", INPUTS).reply(10)
        said = [line for line in worker.log().splitlines() if line.startswith("fleet: ")]

    assert len(said) == 1
    assert "maxmemory-policy" in said[0]


@pytest.mark.parametrize("trouble", ["a user without a right", "a replica"])
def test_what_shows_only_at_the_first_write_is_one_line_too(
    client: redis.Redis, server: TestServer, managed: str, config: Path, trouble: str
) -> None:
    if trouble == "a replica":
        client.replicaof("127.0.0.1", "1")
    else:
        client.execute_command("ACL", "SETUSER", "app", "-evalsha")
    try:
        with running_worker(
            server, config, environ={"FLEET_BROKER_URL": managed}, wait=False
        ) as worker:
            assert worker.process is not None
            assert worker.process.wait(20) == 2
            *_, last = worker.log().splitlines()
            assert "Traceback" not in worker.log()
    finally:
        client.replicaof("NO", "ONE")

    assert last.startswith("fleet: ")
    assert "FLEET_BROKER_URL" in last
    assert "a-secret" not in last


def test_a_server_that_loads_its_file_is_not_called_absent() -> None:
    def told(url: str) -> str | None:
        """Return what is said once the server listens."""
        try:
            return f"no complaint, but {warnings(url)}"
        except ConfigError as error:
            return None if "There is no Redis" in str(error) else str(error)

    with running_server() as server:
        with server.client() as client, client.pipeline(transaction=False) as pipe:
            for _ in range(10_000):
                pipe.incr("ballast")
            pipe.execute()
        server.stop()
        # Microseconds for each command of the file.
        server.start("--key-load-delay", "400", wait=False)

        text = wait_until(partial(told, server.url), what="an answer", every_s=0.005)

    assert "still loads its file" in text
