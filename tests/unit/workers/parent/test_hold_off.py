"""When a worker may take over what others hold."""

from __future__ import annotations

import pytest

from workers.parent.hold_off import HoldOff

TTL_S = 15.0


@pytest.fixture
def hold_off() -> HoldOff:
    return HoldOff.begin(ttl_s=TTL_S, now_s=100)


def renewed_until(hold_off: HoldOff, until_s: float, *, since_s: float = 100) -> None:
    now_s = since_s
    while now_s <= until_s:
        hold_off.renewed(now_s=now_s)
        now_s += TTL_S / 3


def test_nothing_is_taken_over_within_a_claims_life_after_the_start(hold_off: HoldOff) -> None:
    renewed_until(hold_off, 110)

    assert not hold_off.allows(now_s=114.9)
    assert hold_off.allows(now_s=115)


def test_renewals_in_time_do_not_hold_off(hold_off: HoldOff) -> None:
    renewed_until(hold_off, 130)

    assert hold_off.allows(now_s=130)


def test_a_renewal_that_comes_late_holds_off_like_a_failed_one(hold_off: HoldOff) -> None:
    renewed_until(hold_off, 130)

    hold_off.renewed(now_s=141)

    renewed_until(hold_off, 151, since_s=146)
    assert not hold_off.allows(now_s=155.9)
    assert hold_off.allows(now_s=156)


def test_nothing_is_taken_over_while_the_renewal_is_late(hold_off: HoldOff) -> None:
    renewed_until(hold_off, 130)

    # A server that stood still answered what was asked before the next renewal.
    assert not hold_off.allows(now_s=140.1)
    assert hold_off.allows(now_s=140)


def test_a_failure_holds_off_from_its_own_time(hold_off: HoldOff) -> None:
    hold_off.failed(now_s=120)
    renewed_until(hold_off, 130)

    assert not hold_off.allows(now_s=134.9)
    assert hold_off.allows(now_s=135)


def test_a_renewal_after_a_failure_does_not_shorten_it(hold_off: HoldOff) -> None:
    renewed_until(hold_off, 130)
    hold_off.failed(now_s=131)

    hold_off.renewed(now_s=135)

    assert not hold_off.allows(now_s=145.9)


def test_a_servers_clock_that_was_set_forward_holds_off(hold_off: HoldOff) -> None:
    hold_off.heard(server_unix_s=5000, now_s=120)
    hold_off.heard(server_unix_s=5060, now_s=122)
    renewed_until(hold_off, 135)

    assert not hold_off.allows(now_s=136.9)
    assert hold_off.allows(now_s=137)


@pytest.mark.parametrize("server_unix_s", [5002.5, 5006, 4000])
def test_a_servers_clock_that_goes_on_or_back_does_not_hold_off(
    hold_off: HoldOff, server_unix_s: float
) -> None:
    hold_off.heard(server_unix_s=5000, now_s=120)
    hold_off.heard(server_unix_s=server_unix_s, now_s=122)
    renewed_until(hold_off, 120)

    assert hold_off.allows(now_s=122)
