"""The number of instances follows the queue, slowly enough that nothing flaps."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from workers.autoscale import Policy, Scale, Seen, begin, decide

POLICY = Policy(min=1, max=4, target_drain_s=5, down_after_s=60)
IDLE = Seen(waiting_rows=0, rows_per_s=20, busy=0)


def run(
    seen_at: Callable[[float], Seen | None], *, until_s: int, scale: Scale | None = None
) -> list[tuple[float, int]]:
    """Decide once a second; return each change as (time, instances)."""
    scale = scale or begin(POLICY, now_s=0)
    changes = []
    for second in range(1, until_s):
        before = scale.instances
        scale = decide(POLICY, scale, seen_at(float(second)), now_s=float(second))
        if scale.instances != before:
            changes.append((float(second), scale.instances))
    return changes


def test_a_step_of_load_grows_one_by_one_to_the_most() -> None:
    load = dataclasses.replace(IDLE, waiting_rows=2000, busy=1)

    changes = run(lambda _: load, until_s=15)

    assert [instances for _, instances in changes] == [2, 3, 4]
    assert changes[-1][0] <= 4


def test_an_empty_queue_shrinks_to_the_least_after_the_quiet_time() -> None:
    four = Scale(instances=4, changed_at_s=0)

    changes = run(lambda _: IDLE, until_s=120, scale=four)

    assert [instances for _, instances in changes] == [3, 2, 1]
    assert changes[0][0] >= POLICY.down_after_s
    assert changes[-1][0] <= POLICY.down_after_s + 15


def test_a_queue_that_is_emptied_in_time_is_no_reason_to_grow() -> None:
    busy = dataclasses.replace(IDLE, waiting_rows=20, busy=1)

    assert run(lambda _: busy, until_s=600) == []


def test_a_trickle_at_the_edge_of_the_quiet_time_changes_at_most_once_a_minute() -> None:
    chance = random.Random(1)
    jobs, at_s = set(), 0.0
    for _ in range(40):
        at_s += POLICY.down_after_s * chance.uniform(0.9, 1.1)
        jobs.add(round(at_s))
    a_job = dataclasses.replace(IDLE, waiting_rows=1, busy=0.05)

    changes = run(
        lambda now_s: a_job if round(now_s) in jobs else IDLE,
        until_s=int(at_s) + 100,
        scale=Scale(instances=4, changed_at_s=0),
    )

    times = [time_s for time_s, _ in changes]
    assert len(changes) <= 3
    assert all(instances < 4 for _, instances in changes)
    assert times == sorted(times)


def test_a_load_that_one_instance_less_could_barely_carry_keeps_them_all() -> None:
    steady = dataclasses.replace(IDLE, waiting_rows=2, busy=0.7)
    three = Scale(instances=3, changed_at_s=0)

    assert run(lambda _: steady, until_s=600, scale=three) == []


def test_nobody_can_look_and_nothing_changes() -> None:
    two = Scale(instances=2, changed_at_s=0)

    assert run(lambda _: None, until_s=600, scale=two) == []


def test_a_time_without_sight_starts_the_quiet_time_anew() -> None:
    four = Scale(instances=4, changed_at_s=0)

    changes = run(lambda now_s: None if 40 <= now_s < 60 else IDLE, until_s=130, scale=four)

    assert changes[0][0] >= 60 + POLICY.down_after_s


def test_workers_share_what_waits() -> None:
    alone = dataclasses.replace(IDLE, waiting_rows=150, busy=1)
    together = dataclasses.replace(alone, workers=2)

    assert len(run(lambda _: alone, until_s=30)) == 1
    assert run(lambda _: together, until_s=30) == []


@pytest.mark.parametrize("rows_per_s", [None, 0.0], ids=["none ended", "none ended, one runs"])
def test_before_the_first_batch_anything_that_waits_long_is_a_reason(
    rows_per_s: float | None,
) -> None:
    unmeasured = Seen(waiting_rows=10, rows_per_s=rows_per_s, busy=1)

    changes = run(lambda _: unmeasured, until_s=3)

    assert changes[0][1] == 2


def test_new_bounds_are_obeyed_at_once() -> None:
    narrow = dataclasses.replace(POLICY, max=2)

    scale = decide(narrow, Scale(instances=4, changed_at_s=0), IDLE, now_s=1)

    assert scale.instances == 2
