"""A Redis that refuses for a while, or has lost something: the worker stays, and goes on with it.

What was accepted before is answered once, unless Redis itself has forgotten it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import redis

from producer.client import Client, Job
from producer.contract.app import make_app
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings
from tests.support.engines import Do, row, starts
from tests.support.servers import TestServer, running_server
from tests.support.waiting import wait_until
from tests.support.worker import Worker, running_worker

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

MODEL = "scripted"
QUEUE = f"fleet.{MODEL}"
KEYS = Keys()
#: Longer than a claim lives: afterwards every claim looks dead to every other worker.
TROUBLE_S = 4.0
CLAIM_TTL_S = "3"
AGAIN_WITHIN_S = 30.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def admin(broker: TestServer) -> Iterator[redis.Redis]:
    with broker.client() as client:
        yield client


def submit(fleet: Client, log: Path) -> list[Job]:
    """Send 40 jobs, of which the first runs for 2 s, and wait until it does."""
    first = fleet.submit(MODEL, {"x": row(Do.SLEEP, 2, job=1)})
    wait_until(lambda: starts(log).get(1), what="the first start")
    return [first, *fleet.submit_many(MODEL, ({"x": row(job=n)} for n in range(2, 41)))]


def pids(workers: Sequence[Worker]) -> list[tuple[int, list[int]]]:
    return [(worker.pid, worker.instance_pids()) for worker in workers]


def log_of(workers: Sequence[Worker]) -> str:
    return "".join(worker.log() for worker in workers)


@contextlib.contextmanager
def two_workers(broker: TestServer, config: Path, url: str) -> Iterator[list[Worker]]:
    environ = {"FLEET_BROKER_URL": url or broker.url, "FLEET_CLAIM_TTL_S": CLAIM_TTL_S}
    with (
        running_worker(broker, config, node="w1", environ=environ, wait=False) as first,
        running_worker(broker, config, node="w2", environ=environ, wait=False) as second,
    ):
        for worker in (first, second):
            worker.wait_ready()
        yield [first, second]


def wait_until_both_answer(broker: TestServer) -> None:
    """Wait until both parents answer remote control."""
    with make_app(Settings(broker_url=broker.url)) as app:
        wait_until(
            lambda: len(app.control.ping(limit=2, timeout=2.0)) == 2,
            what="both workers' answers to a ping",
            timeout_s=AGAIN_WITHIN_S,
        )


def outlive(
    broker: TestServer,
    config: Path,
    log: Path,
    begin: Callable[[], object],
    end: Callable[[], object],
    *,
    url: str = "",
) -> str:
    """Have jobs accepted, then Redis in trouble; returns what the workers logged.

    Fails unless the same processes answer all of them, and more, and nothing ran twice.
    """
    with (
        two_workers(broker, config, url) as workers,
        Client(Settings(broker_url=broker.url)) as fleet,
    ):
        before = pids(workers)
        jobs = submit(fleet, log)

        begin()
        time.sleep(TROUBLE_S)
        end()

        began_s = time.monotonic()
        fleet.submit(MODEL, {"x": row(job=99)}).reply(AGAIN_WITHIN_S)
        print(f"answered {time.monotonic() - began_s:.2f} s after the end of the trouble")
        for job in jobs:
            job.reply(AGAIN_WITHIN_S)
        wait_until_both_answer(broker)
        assert pids(workers) == before
        assert starts(log) == dict.fromkeys([*range(1, 41), 99], 1)
        return log_of(workers)


def test_a_server_that_was_a_replica_for_a_while(
    broker: TestServer, admin: redis.Redis, config: Path, log: Path
) -> None:
    text = outlive(
        broker,
        config,
        log,
        lambda: admin.replicaof("127.0.0.1", "1"),
        lambda: admin.replicaof("NO", "ONE"),
    )

    assert "ReadOnlyError" in text


@pytest.mark.chaos
def test_a_server_that_cannot_save_for_a_while(
    broker: TestServer, admin: redis.Redis, config: Path, log: Path
) -> None:
    """A folder in the place of its file is in the way even of root."""
    in_the_way = broker.folder / "dump.rdb"

    def save(status: str) -> None:
        admin.bgsave()
        wait_until(
            lambda: (
                (info := admin.info("persistence"))["rdb_last_bgsave_status"] == status
                and not info["rdb_bgsave_in_progress"]
            ),
            what=f"a save that ends with {status}",
        )

    def fail() -> None:
        admin.config_set("save", "3600 1")
        in_the_way.mkdir()
        save("err")

    def mend() -> None:
        in_the_way.rmdir()
        save("ok")

    text = outlive(broker, config, log, fail, mend)

    assert "MISCONF" in text


@pytest.mark.chaos
@pytest.mark.parametrize("right", ["@all", "evalsha", "zadd"])
def test_a_user_who_lost_a_right_for_a_while(
    broker: TestServer, admin: redis.Redis, config: Path, log: Path, right: str
) -> None:
    def set_user(*rules: str) -> None:
        admin.execute_command("ACL", "SETUSER", "worker", *rules)

    set_user("on", ">pw", "~*", "&*", "+@all")

    text = outlive(
        broker,
        config,
        log,
        lambda: set_user(f"-{right}"),
        lambda: set_user("+@all"),
        url=broker.url.replace("redis://", "redis://worker:pw@"),
    )

    assert "no permissions" in text


@pytest.mark.chaos
@pytest.mark.timeout(180)
def test_a_server_that_loads_its_file_for_a_while(
    broker: TestServer, admin: redis.Redis, config: Path, log: Path
) -> None:
    pipe = admin.pipeline(transaction=False)
    for _ in range(8_000):
        pipe.incr("ballast")
    pipe.expire("ballast", 600)
    pipe.execute()

    def restart() -> None:
        broker.stop()
        # Microseconds for each command of the file.
        broker.start("--key-load-delay", "500", wait=False)

    def loaded() -> bool:
        try:
            return bool(admin.ping())
        except redis.RedisError:
            return False

    text = outlive(
        broker,
        config,
        log,
        restart,
        lambda: wait_until(loaded, what="the end of loading", timeout_s=60),
    )

    assert "loading the dataset" in text


def break_off_reads(client: redis.Redis) -> bool:
    """Return whether a read was there to be broken off."""
    reads = [each["id"] for each in client.client_list() if each["cmd"] == "xreadgroup"]
    broken_off = [client.execute_command("CLIENT", "UNBLOCK", each, "ERROR") for each in reads]
    return any(broken_off)


#: What is taken from under a worker, and whether Redis forgets the job that runs.
TAKEN: Mapping[str, tuple[Callable[[redis.Redis], object], bool]] = {
    "a read": (break_off_reads, False),
    "a stream": (lambda client: client.delete(KEYS.stream(QUEUE, Priority.NORMAL)), True),
    "all": (lambda client: client.flushall(), True),
}


@pytest.mark.chaos
@pytest.mark.scripts
def test_what_a_worker_waits_for_is_taken_away(
    server: TestServer, client: redis.Redis, config: Path, log: Path
) -> None:
    """One instance runs a job, the other waits at the doorbell."""
    numbers = itertools.count(1)
    with (
        two_workers(server, config, "") as workers,
        Client(Settings(broker_url=server.url)) as fleet,
    ):
        before = pids(workers)
        for what, (take, forgets) in TAKEN.items():
            first = next(numbers)
            held = fleet.submit(MODEL, {"x": row(Do.SLEEP, 1, job=first)})
            wait_until(partial(started, log, first), what="the start")
            wait_until(partial(waits, client), what="a doorbell", every_s=0.001)
            lost = log_of(workers).count("job.lost")

            wait_until(partial(take, client), what=what, every_s=0.001)

            began_s = time.monotonic()
            for job in fleet.submit_many(MODEL, ({"x": row(job=next(numbers))} for _ in range(20))):
                job.reply(AGAIN_WITHIN_S)
            print(f"{what}: answered {time.monotonic() - began_s:.2f} s later")
            if forgets:
                wait_until(partial(more_lost, workers, lost), what="its end")
            else:
                held.reply(AGAIN_WITHIN_S)
        wait_until_both_answer(server)
        assert pids(workers) == before

    assert set(starts(log).values()) == {1}
    assert len(starts(log)) == 3 * 21


def more_lost(workers: Sequence[Worker], than: int) -> bool:
    return log_of(workers).count("job.lost") > than


def started(log: Path, number: int) -> bool:
    return number in starts(log)


def waits(client: redis.Redis) -> bool:
    return any(each["cmd"] == "xreadgroup" for each in client.client_list())
