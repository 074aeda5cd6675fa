"""Leases of instances on a real server, between workers that run nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from producer.contract.names import Keys
from tests.support.leasing import HOST, Tenant, cpu_slots
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from workers.delivery.scripts import send
from workers.instances import clock

pytestmark = [pytest.mark.redis, pytest.mark.scripts]

KEYS = Keys()
FOUR = cpu_slots(4)
TTL_S = 0.6


def turns(*tenants: Tenant, until: Callable[[], object] = lambda: False, most: int = 30) -> None:
    """Let every worker look in turn, until it holds or they looked ``most`` times."""
    for _ in range(most):
        for tenant in tenants:
            tenant.turn()
        if until():
            return


def wait_for(tenant: Tenant, count: int) -> None:
    """Let a worker look until it holds so many instances."""

    def held() -> bool:
        tenant.turn()
        return tenant.holds == count

    wait_until(held, what=f"{count} instances", timeout_s=5)


def tenants(client: redis.Redis, count: int) -> list[Tenant]:
    return [
        Tenant(client, f"w{number}", age=number, instances=FOUR) for number in range(1, count + 1)
    ]


def test_one_worker_has_all_and_holds_them_by_leases_that_expire(client: redis.Redis) -> None:
    (tenant,) = tenants(client, 1)

    tenant.turn()

    assert tenant.holds == 4
    assert tenant.leasing.holders == {each.key: "w1@test" for each in FOUR}
    assert all(client.pttl(KEYS.lease(each.key)) > 0 for each in FOUR)
    assert client.ttl(KEYS.host(HOST)) > 0


@pytest.mark.parametrize(("count", "parts"), [(2, [2, 2]), (4, [1] * 4), (6, [1, 1, 1, 1, 0, 0])])
def test_workers_that_come_later_get_their_share(
    client: redis.Redis, count: int, parts: list[int]
) -> None:
    workers = tenants(client, count)
    workers[0].turn()

    turns(*workers, until=lambda: [worker.holds for worker in workers] == parts)

    assert [worker.holds for worker in workers] == parts
    turns(*workers, most=3)
    assert [worker.holds for worker in workers] == parts


def test_a_worker_of_fewer_instances_gets_some_of_those_that_all_may_use(
    client: redis.Redis,
) -> None:
    wide = Tenant(client, "wide", age=1, instances=FOUR)
    narrow = Tenant(client, "narrow", age=2, instances=FOUR[:2])
    wide.turn()

    turns(wide, narrow, until=lambda: narrow.holds == 2)
    turns(wide, narrow, most=3)

    assert wide.slots.occupied == {2, 3}
    assert narrow.slots.occupied == {0, 1}


def test_the_one_instance_of_a_worker_is_given_back_by_one_that_has_others(
    client: redis.Redis,
) -> None:
    wide = Tenant(client, "wide", age=1, instances=FOUR)
    narrow = Tenant(client, "narrow", age=2, instances=FOUR[1:2])
    wide.turn()

    turns(wide, narrow, until=lambda: narrow.holds == 1)
    turns(wide, narrow, most=3)

    assert wide.slots.occupied == {0, 2, 3}
    assert narrow.holds == 1


def test_a_worker_that_dies_again_and_again_counts_once(client: redis.Redis) -> None:
    healthy = Tenant(client, "healthy", age=1, instances=FOUR)
    healthy.turn()

    for age in range(2, 8):
        Tenant(client, "mad", age=age, instances=FOUR).turn()
        healthy.turn()

    assert healthy.leasing.share == 2


@pytest.mark.parametrize("words", [b"", b"{}", b'{"since_unix_s": 1}', b"99999999999999 []"])
def test_a_worker_that_speaks_otherwise_stops_nobody(client: redis.Redis, words: bytes) -> None:
    client.hset(KEYS.host(HOST), "other@test", words)
    client.hset(KEYS.host(HOST), "another@test", b"99999999999999 " + words)
    (tenant,) = tenants(client, 1)

    tenant.turn()

    assert tenant.holds == 4


def test_who_waits_for_a_namesake_is_told_to_take_another_name(client: redis.Redis) -> None:
    first = Tenant(client, "same", age=1, instances=FOUR)
    first.turn()
    # Tokens of one process differ by the millisecond in which they were made.
    second = wait_until(lambda: _another(client, first), what="a second worker of the name")

    turns(first, second, most=3)

    assert (first.holds, second.holds) == (4, 0)
    assert "held in this worker's own name, same@test" in second.leasing.waiting
    assert "give this one another name (-n)" in second.leasing.waiting


def _another(client: redis.Redis, first: Tenant) -> Tenant | None:
    second = Tenant(client, "same", age=2, instances=FOUR)
    return second if second.leases.token != first.leases.token else None


def test_who_has_none_says_why_until_it_has_one(client: redis.Redis) -> None:
    one, two = (
        Tenant(client, f"w{age}", age=age, instances=FOUR[:1], ttl_s=TTL_S) for age in (1, 2)
    )
    turns(one, two, most=2)
    assert "the 1 of this host are shared by 2 workers" in two.leasing.waiting

    one.leasing.drain()
    one.slots.occupied.clear()
    one.leasing.leave()
    two.turn()

    assert two.holds == 1
    assert two.leasing.waiting == ""


def test_a_machine_that_slept_takes_nothing_over_when_it_wakes(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (Tenant(client, f"w{age}", age=age, instances=FOUR, ttl_s=TTL_S) for age in (1, 2))
    until_s = time.monotonic() + 1.5 * TTL_S
    while time.monotonic() < until_s:
        # Its processes never end, so what it should give back stays its own.
        one.leasing.turn()
        two.turn()

    # The server's clock went on and the one here did not: as if the server's was set forward.
    slept_s, awake_s = 1.5 * TTL_S, time.monotonic
    time.sleep(slept_s)
    monkeypatch.setattr(time, "monotonic", lambda: awake_s() - slept_s)
    two.turn()
    two.turn()

    assert two.holds == 0
    assert one.holds == 4
    one.leasing.turn()
    assert one.holds == 4


def test_a_process_that_still_runs_keeps_its_instance_when_its_worker_leaves(
    client: redis.Redis,
) -> None:
    one, two = tenants(client, 2)
    one.turn()

    one.leasing.drain()
    one.leasing.leave()
    turns(two, most=3)

    assert two.holds == 0


def test_a_dead_workers_instance_is_taken_when_its_lease_is_over_and_not_at_first_sight(
    client: redis.Redis,
) -> None:
    dead = Tenant(client, "dead", age=1, instances=FOUR[:1], ttl_s=TTL_S)
    dead.turn()
    time.sleep(1.5 * TTL_S)
    heir = Tenant(client, "heir", age=2, instances=FOUR[:1], ttl_s=TTL_S)
    born_s = time.monotonic()

    heir.turn()
    assert heir.holds == 0
    wait_for(heir, 1)

    assert time.monotonic() - born_s >= TTL_S


def test_a_process_whose_parent_stands_still_keeps_its_instance(client: redis.Redis) -> None:
    stopped = Tenant(client, "stopped", age=1, instances=FOUR[:1], ttl_s=TTL_S)
    stopped.turn()
    other = Tenant(client, "other", age=2, instances=FOUR[:1], ttl_s=TTL_S)

    until_s = time.monotonic() + 4 * TTL_S
    while time.monotonic() < until_s:
        # What the process does by itself.
        assert send(client, stopped.leases.keep(FOUR[0].key, "")) == [True]
        other.turn()
        time.sleep(TTL_S / 3)

    assert other.holds == 0
    assert other.leasing.share == 1


def test_a_lease_that_ran_out_is_renewed_by_its_holder_as_long_as_nobody_took_it(
    client: redis.Redis,
) -> None:
    tenant = Tenant(client, "w1", age=1, instances=FOUR[:1], ttl_s=TTL_S)
    tenant.turn()
    time.sleep(1.5 * TTL_S)

    tenant.turn()

    assert tenant.slots.ended == {}
    assert tenant.slots.until_s[0] > clock.now_s()


def test_a_process_on_an_instance_that_another_worker_took_is_ended(client: redis.Redis) -> None:
    cut_off = Tenant(client, "cut-off", age=1, instances=FOUR[:1], ttl_s=TTL_S)
    cut_off.turn()
    heir = Tenant(client, "heir", age=2, instances=FOUR[:1], ttl_s=TTL_S)
    wait_for(heir, 1)

    assert send(client, cut_off.leases.keep(FOUR[0].key, "")) == [False]
    cut_off.turn()

    assert cut_off.slots.ended == {0: "another worker holds its instance"}


def test_leases_that_the_server_lost_are_written_again(client: redis.Redis) -> None:
    one, two = tenants(client, 2)
    turns(one, two, until=lambda: one.holds == two.holds == 2)

    client.flushall()
    turns(one, two, most=3)

    assert (one.holds, two.holds) == (2, 2)
    assert not one.slots.ended
    assert not two.slots.ended


def test_nothing_is_taken_soon_after_the_server_was_out_of_reach(
    client: redis.Redis, server: TestServer
) -> None:
    impatient = redis.Redis(port=server.port, socket_timeout=1, retry=Retry(NoBackoff(), 0))
    with impatient:
        tenant = Tenant(impatient, "w1", age=1, instances=FOUR, ttl_s=TTL_S, wanted=1)
        tenant.turn()
        server.freeze()
        try:
            with pytest.raises(redis.TimeoutError):
                tenant.turn()
        finally:
            server.thaw()
        tenant.slots.wanted = 2

        tenant.turn()
        assert tenant.holds == 1
        wait_for(tenant, 2)


def test_a_take_that_the_server_reads_late_takes_nothing(client: redis.Redis) -> None:
    leases = Tenant(client, "w1", age=1, instances=FOUR).leases
    key = FOUR[0].key

    late = leases.take([key], over=frozenset(), until_unix_s=time.time() - 1)
    in_time = leases.take([key], over=frozenset(), until_unix_s=time.time() + 5)

    assert send(client, late, in_time) == [[], [key]]


def test_a_full_server_leases_and_renews(client: redis.Redis) -> None:
    one, two = tenants(client, 2)
    one.slots.wanted = 1
    one.turn()
    used = int(client.info("memory")["used_memory"])
    try:
        client.config_set("maxmemory", str(max(1, used // 2)))
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("another", "key")

        turns(one, two, most=2)
    finally:
        client.config_set("maxmemory", "0")

    assert (one.holds, two.holds) == (1, 2)


def test_a_device_that_is_gone_is_given_up_and_comes_back(client: redis.Redis) -> None:
    tenant = Tenant(client, "w1", age=1, instances=FOUR[:2])
    tenant.turn()

    tenant.losses.gone = {FOUR[0].key: "fell off the bus"}
    turns(tenant, most=2)
    assert tenant.slots.lost == {0: "fell off the bus"}
    assert tenant.slots.occupied == {1}
    assert client.exists(KEYS.lease(FOUR[0].key)) == 0
    assert tenant.leasing.waiting == ""

    tenant.losses.gone = {}
    turns(tenant, most=2)
    assert tenant.slots.occupied == {0, 1}


def test_a_worker_whose_only_device_is_gone_does_not_pass_for_one_that_waits(
    client: redis.Redis,
) -> None:
    tenant = Tenant(client, "w1", age=1, instances=FOUR[:1])
    tenant.turn()

    tenant.losses.gone = {FOUR[0].key: "fell off the bus"}
    turns(tenant, most=2)

    assert (tenant.holds, tenant.leasing.waiting) == (0, "")


def test_a_number_that_shrinks_is_given_back_and_one_that_grows_taken(client: redis.Redis) -> None:
    tenant = Tenant(client, "w1", age=1, instances=FOUR)
    tenant.turn()

    tenant.slots.wanted = 1
    turns(tenant, until=lambda: tenant.holds == 1)
    assert tenant.holds == 1
    assert sum(client.exists(KEYS.lease(each.key)) for each in FOUR) == 1

    tenant.slots.wanted = 3
    tenant.turn()
    assert tenant.holds == 3
