"""What the dead held is taken at once where the kernel says that they are dead; else it is not."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from producer.contract.names import FREE, GROUP, Keys, Priority, queue_of
from tests.support.leasing import Tenant, cpu_slots, leasing_nothing
from tests.support.lives import Being, being
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from workers.delivery.scripts import send
from workers.instances.leases import Held, Sight
from workers.parent.keeper import Keeper
from workers.serving import Serving

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked by /proc"),
]

KEYS = Keys()
ONE = cpu_slots(1)
(KEY,) = (each.key for each in ONE)
STREAM = KEYS.stream(queue_of("m"), Priority.NORMAL)


@pytest.fixture
def parent() -> Iterator[Being]:
    with being() as made:
        yield made


@pytest.fixture
def process() -> Iterator[Being]:
    with being() as made:
        yield made


@pytest.fixture
def holder(client: redis.Redis, parent: Being) -> Tenant:
    """Return a worker that holds the one instance; nobody has lived on it yet."""
    made = Tenant(client, "holder", age=1, instances=ONE, life=parent.life)
    made.turn()
    assert made.holds == 1
    return made


@pytest.fixture
def heir(client: redis.Redis) -> Tenant:
    """Return a worker that would have it, and has just been started."""
    return Tenant(client, "heir", age=2, instances=ONE)


def live_on_it(client: redis.Redis, holder: Tenant, life: str) -> bool:
    """Say that a process is on the instance, as it does itself; returns whether it may."""
    (may,) = send(client, holder.leases.keep(KEY, life))
    return bool(may)


def seen(client: redis.Redis, heir: Tenant) -> Held:
    sight: Sight
    (sight,) = send(client, heir.leases.hold(None, [KEY], frozenset()))
    return sight.leases[KEY]


def test_the_instance_of_a_dead_worker_is_taken_at_once(
    client: redis.Redis, holder: Tenant, heir: Tenant, parent: Being, process: Being
) -> None:
    live_on_it(client, holder, process.life)
    heir.turn()
    assert (heir.holds, heir.leasing.share) == (0, 0)

    process.die()
    parent.die()
    heir.turn()

    # The dead one has no share either.
    assert (heir.holds, heir.leasing.share) == (1, 1)
    assert heir.leasing.holders == {KEY: "heir@test"}


def test_a_process_that_outlives_its_parent_has_its_instance_for_as_long(
    client: redis.Redis, holder: Tenant, heir: Tenant, parent: Being, process: Being
) -> None:
    live_on_it(client, holder, process.life)
    parent.die()
    for _ in range(3):
        heir.turn()
        assert heir.holds == 0

    process.become_zombie()
    heir.turn()

    assert heir.holds == 1


def test_a_parent_that_stands_still_is_not_dead(
    client: redis.Redis, holder: Tenant, heir: Tenant, parent: Being, process: Being
) -> None:
    live_on_it(client, holder, process.life)
    process.die()
    os.kill(parent.process.pid, signal.SIGSTOP)

    heir.turn()

    assert heir.holds == 0


def test_a_worker_that_died_before_anybody_lived_there_is_inherited_at_once(
    holder: Tenant, heir: Tenant, parent: Being
) -> None:
    parent.die()
    heir.turn()

    assert heir.holds == 1


def test_a_process_that_speaks_after_its_parents_death_may_not_stay(
    client: redis.Redis, holder: Tenant, heir: Tenant, parent: Being, process: Being
) -> None:
    parent.die()
    heir.turn()

    assert not live_on_it(client, holder, process.life)
    assert seen(client, heir).process == "-"


def test_a_process_that_speaks_between_a_look_and_the_take_keeps_the_instance(
    client: redis.Redis, holder: Tenant, heir: Tenant, parent: Being, process: Being
) -> None:
    parent.die()
    looked = seen(client, heir)
    assert looked.is_dead

    assert live_on_it(client, holder, process.life)
    take = heir.leases.take([KEY], dead={KEY: looked}, until_unix_s=2**33)

    assert send(client, take) == [[]]
    assert seen(client, holder).words == f"{holder.leases.token}\t{process.life}"


def test_of_two_heirs_one_takes_it(
    client: redis.Redis, holder: Tenant, heir: Tenant, parent: Being
) -> None:
    other = Tenant(client, "other", age=3, instances=ONE)
    parent.die()
    looked = seen(client, heir)

    takes = [
        each.leases.take([KEY], dead={KEY: looked}, until_unix_s=2**33) for each in (heir, other)
    ]

    assert send(client, *takes) == [[KEY], []]


@pytest.mark.parametrize("told", ["", "0123456789abcdef:1:1"])
def test_an_instance_whose_process_is_not_known_here_is_waited_for(
    client: redis.Redis, holder: Tenant, heir: Tenant, parent: Being, told: str
) -> None:
    live_on_it(client, holder, told)
    parent.die()

    heir.turn()

    assert heir.holds == 0


def test_what_the_server_forgot_of_a_process_is_not_taken_for_its_death(
    client: redis.Redis, holder: Tenant, heir: Tenant, parent: Being, process: Being
) -> None:
    live_on_it(client, holder, process.life)
    client.flushall()
    holder.turn()
    parent.die()

    heir.turn()

    assert heir.holds == 0


def test_a_renewal_by_the_parent_leaves_the_process_in_the_lease(
    client: redis.Redis, holder: Tenant, heir: Tenant, process: Being
) -> None:
    live_on_it(client, holder, process.life)

    holder.turn()

    assert seen(client, heir).process == process.life


def test_claims_of_the_dead_are_free_at_once_and_those_of_others_are_not(
    client: redis.Redis, server: TestServer, parent: Being, process: Being
) -> None:
    with being() as living, server.client() as own:
        dead = f"w@test/0/1.1.1+{parent.life}+{process.life}"
        bereft = f"w@test/0/1.2.1+{parent.life}+{living.life}"
        childless = f"w@test/0/1.3.1+{living.life}+{process.life}"
        elsewhere = "w@test/0/1.4.1+0123456789abcdef:1:1+0123456789abcdef:2:1"
        keeper = Keeper(
            client=own,
            keys=KEYS,
            node="keeper@test",
            serving=Serving(["m"]),
            claim_ttl_s=15,
            consumers=list,
            status=dict,
            leasing=leasing_nothing(own),
        )
        keeper.prepare()
        for name in (dead, bereft, childless, elsewhere):
            client.xadd(STREAM, {"id": name})
            client.xreadgroup(GROUP, name, {STREAM: ">"})
        parent.die()
        process.die()

        keeper.start()
        try:
            wait_until(lambda: FREE in held_by(client), what="a claim to be free", timeout_s=5)
        finally:
            keeper.stop(10)
        assert held_by(client) == {FREE: dead, **{n: n for n in (bereft, childless, elsewhere)}}
        client.flushall()


def held_by(client: redis.Redis) -> dict[str, str]:
    """Return by holder the job that it holds."""
    found = {}
    pending: Any = client.xpending_range(STREAM, GROUP, "-", "+", 10)
    for each in pending:
        entries: Any = client.xrange(STREAM, each["message_id"], each["message_id"])
        found[each["consumer"].decode()] = entries[0][1][b"id"].decode()
    return found
