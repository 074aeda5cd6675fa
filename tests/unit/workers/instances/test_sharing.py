"""How the workers of a host share its instances, and what each does about it next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.instances.sharing import (
    Sharer,
    Step,
    dealt_to,
    next_step,
    own_part_first,
)


def sharer(age: float, *keys: str) -> Sharer:
    return Sharer(since_unix_s=age, token=f"w{age:g}", may_use=frozenset(keys))


def dealt(*workers: Sharer) -> list[set[str]]:
    """Return the part of each as it works it out itself."""
    return [set(dealt_to(own, workers)) for own in workers]


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
    keys = [f"cpu/{number}" for number in range(instances)]

    assert [len(part) for part in dealt(*(sharer(age, *keys) for age in range(workers)))] == parts


@given(st.lists(st.frozensets(st.sampled_from("abcdef")), min_size=1, max_size=6))
def test_every_instance_is_the_part_of_one_who_may_use_it(may_use: list[frozenset[str]]) -> None:
    workers = [sharer(age, *keys) for age, keys in enumerate(may_use)]
    parts = dealt(*workers)

    assert sum(map(len, parts)) == len(set().union(*parts)) == len(set().union(*may_use))
    for part, mine in zip(parts, may_use, strict=True):
        assert part <= mine
        # Nobody goes without what another has two of.
        for other in parts:
            assert len(part) >= 1 or len(other) <= 1 or not other & mine


def test_the_youngest_worker_is_the_last_to_get_one() -> None:
    old, middle, young = (sharer(age, "a", "b") for age in (1, 2, 3))

    assert [len(dealt_to(own, [young, old, middle])) for own in (old, middle, young)] == [1, 1, 0]


def test_a_worker_that_nobody_sees_yet_counts_itself() -> None:
    assert len(dealt_to(sharer(2, "a", "b"), [sharer(1, "a", "b")])) == 1
    assert dealt_to(sharer(2, "a", "b"), []) == {"a", "b"}


def test_workers_with_instances_of_their_own_share_nothing() -> None:
    assert dealt(sharer(1, "a"), sharer(2, "b")) == [{"a"}, {"b"}]


def test_a_worker_of_one_instance_gets_it_from_one_that_has_others() -> None:
    wide, narrow = sharer(1, "a", "b", "c", "d"), sharer(2, "a")

    assert dealt(wide, narrow) == [{"b", "c", "d"}, {"a"}]


def test_who_could_do_with_another_leaves_the_only_one_of_a_third() -> None:
    assert dealt(sharer(1, "x", "y"), sharer(2, "x"), sharer(3, "y", "z")) == [{"y"}, {"x"}, {"z"}]


def test_what_is_others_part_is_taken_last_and_given_back_first() -> None:
    assert own_part_first({"b", "c"}, ["a", "b", "c"]) == ["b", "c", "a"]


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
