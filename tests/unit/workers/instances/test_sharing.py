"""How the workers of a host share its instances, and what each does about it next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.instances.sharing import (
    Sharer,
    Step,
    least_wanted_first,
    next_step,
    share_of,
    shares,
)


def sharer(age: float, *keys: str) -> Sharer:
    return Sharer(since_unix_s=age, token=f"w{age:g}", may_use=frozenset(keys))


@pytest.mark.parametrize(
    ("instances", "workers", "parts"),
    [
        (4, 1, [4]),
        (4, 4, [1, 1, 1, 1]),
        (4, 6, [1, 1, 1, 1, 0, 0]),
        (4, 2, [2, 2]),
        (7, 3, [3, 2, 2]),
        (0, 2, [0, 0]),
    ],
)
def test_parts_are_equal_and_the_rest_goes_to_the_first(
    instances: int, workers: int, parts: list[int]
) -> None:
    assert shares(instances, workers) == parts


@given(st.integers(0, 200), st.integers(1, 50))
def test_all_parts_together_are_all_instances(instances: int, workers: int) -> None:
    parts = shares(instances, workers)

    assert sum(parts) == instances
    assert max(parts) - min(parts) <= 1
    assert parts == sorted(parts, reverse=True)


def test_the_youngest_worker_is_the_last_to_get_one() -> None:
    old, middle, young = (sharer(age, "a", "b") for age in (1, 2, 3))

    assert [share_of(own, [young, old, middle]) for own in (old, middle, young)] == [1, 1, 0]


def test_a_worker_that_nobody_sees_yet_counts_itself() -> None:
    assert share_of(sharer(2, "a", "b"), [sharer(1, "a", "b")]) == 1
    assert share_of(sharer(2, "a", "b"), []) == 2


def test_workers_with_instances_of_their_own_share_nothing() -> None:
    one, two = sharer(1, "a"), sharer(2, "b")

    assert share_of(one, [one, two]) == share_of(two, [one, two]) == 1


def test_what_others_may_use_is_taken_last_and_given_back_first() -> None:
    own, other = sharer(1, "a", "b", "c"), sharer(2, "a")

    assert least_wanted_first(own, [own, other], ["a", "b", "c"]) == ["b", "c", "a"]


def test_a_lack_is_taken_at_once() -> None:
    assert next_step(3, running=["a"], returning=[], gone=[]) == Step(take=2)


def test_a_surplus_is_given_back_one_at_a_time() -> None:
    assert next_step(1, running=["a", "b", "c"], returning=[], gone=[]) == Step(give_back="c")
    assert next_step(1, running=["a", "b"], returning=["c"], gone=[]) == Step()


def test_what_is_given_back_is_released_when_its_process_is_gone() -> None:
    step = next_step(1, running=["a", "b"], returning=["c"], gone=["c"])

    assert step == Step(give_back="b", release=("c",))


def test_what_is_wanted_again_meanwhile_is_kept() -> None:
    assert next_step(2, running=["a"], returning=["b"], gone=[]) == Step()
    assert next_step(2, running=["a"], returning=["b"], gone=["b"]) == Step(keep=("b",))


@given(
    st.integers(0, 6),
    st.sets(st.sampled_from("abcdef")),
    st.sets(st.sampled_from("uvwxyz")),
    st.sets(st.sampled_from("uvwxyz")),
)
def test_a_step_never_leads_beyond_the_target(
    target: int, running: set[str], returning: set[str], gone: set[str]
) -> None:
    step = next_step(target, running=sorted(running), returning=sorted(returning), gone=gone)

    assert set(step.keep) | set(step.release) <= returning & gone
    after = len(running) + len(step.keep) + step.take
    assert after <= max(target, len(running))
    assert (step.give_back is not None) <= (len(running) > target)
