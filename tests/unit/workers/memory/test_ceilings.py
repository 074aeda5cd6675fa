"""What one process knows of the largest batches, with a clock of the test's own."""

from __future__ import annotations

from workers.batching.ceiling import GROW_AFTER_RUNS, GROW_AFTER_S, Ceiling
from workers.batching.shapes import TensorKey
from workers.memory.ceilings import MOST_SHAPES, Ceilings, Place

SIZES = (TensorKey("x", "<f4", (4,), b""),)


class Clock:
    def __init__(self) -> None:
        self.now_unix_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_unix_s


def full_runs(ceilings: Ceilings, rows: int, count: int = GROW_AFTER_RUNS) -> None:
    for _ in range(count):
        ceilings.of(SIZES)
        ceilings.fitted(SIZES, "fp32", rows)
    ceilings.of(SIZES)


def news(ceilings: Ceilings) -> bool:
    return ceilings.has_news


def lowered_to_eight() -> tuple[Ceilings, Clock]:
    clock = Clock()
    ceilings = Ceilings(clock)
    ceilings.lower(SIZES, "fp32", failed_rows=16)
    ceilings.learn({})
    return ceilings, clock


def test_a_shape_that_always_fitted_has_no_ceiling_and_no_news() -> None:
    ceilings = Ceilings()

    ceilings.fitted(SIZES, "fp32", 32)

    assert ceilings.of(SIZES) == {}
    assert not ceilings.has_news


def test_a_lack_of_memory_is_news_until_the_others_were_told() -> None:
    ceilings = Ceilings()

    ceilings.lower(SIZES, "fp32", failed_rows=16)

    assert news(ceilings)
    ceilings.learn({})
    assert not news(ceilings)
    assert ceilings.of(SIZES) == {"fp32": 8}


def test_more_is_tried_once_after_full_runs_and_time_and_kept_when_it_fits() -> None:
    ceilings, clock = lowered_to_eight()
    full_runs(ceilings, 8)
    assert not news(ceilings)
    clock.now_unix_s += GROW_AFTER_S
    full_runs(ceilings, 8, 1)
    assert news(ceilings)

    ceilings.learn({})
    assert ceilings.of(SIZES) == {"fp32": 10}
    ceilings.fitted(SIZES, "fp32", 10)
    full_runs(ceilings, 10)

    assert ceilings.everything()[SIZES, "fp32"].raised == 1
    assert ceilings.of(SIZES) == {"fp32": 10}


def test_a_try_that_fails_goes_back_to_what_fitted() -> None:
    ceilings, clock = lowered_to_eight()
    clock.now_unix_s += GROW_AFTER_S
    full_runs(ceilings, 8)
    ceilings.learn({})

    ceilings.lower(SIZES, "fp32", failed_rows=10)

    assert ceilings.of(SIZES) == {"fp32": 8}
    clock.now_unix_s += GROW_AFTER_S
    full_runs(ceilings, 8)
    ceilings.learn({})
    assert ceilings.of(SIZES) == {"fp32": 8}


def test_what_another_instance_tried_lately_is_not_tried_again() -> None:
    ceilings, clock = lowered_to_eight()
    clock.now_unix_s += GROW_AFTER_S
    full_runs(ceilings, 8)
    assert ceilings.has_news
    theirs = Ceiling(rows=8, since_unix_s=clock.now_unix_s - 1, failed=1)

    ceilings.learn({(SIZES, "fp32"): theirs})

    assert ceilings.of(SIZES) == {"fp32": 8}
    assert ceilings.everything()[SIZES, "fp32"] == theirs


def test_whoever_is_about_to_try_more_tells_the_others_first() -> None:
    ceilings, clock = lowered_to_eight()
    clock.now_unix_s += GROW_AFTER_S
    full_runs(ceilings, 8)

    ceilings.learn({})

    assert ceilings.everything()[SIZES, "fp32"] == Ceiling(rows=8, since_unix_s=clock.now_unix_s)


def test_a_shape_goes_back_to_what_was_known_of_it() -> None:
    ceilings, _ = lowered_to_eight()
    known, nothing = ceilings.copy_of(SIZES), ceilings.copy_of(())
    ceilings.lower(SIZES, "fp32", failed_rows=8)
    ceilings.lower((), "fp32", failed_rows=8)

    ceilings.restore(SIZES, known)
    ceilings.restore((), nothing)

    assert ceilings.of(SIZES) == {"fp32": 8}
    assert ceilings.of(()) == {}


def test_a_model_of_free_shapes_is_not_remembered_without_end() -> None:
    ceilings = Ceilings()

    for length in range(2 * MOST_SHAPES):
        ceilings.lower((TensorKey("x", "<f4", (length,), b""),), "fp32", failed_rows=16)

    assert len(ceilings.everything()) == MOST_SHAPES


def test_what_others_know_does_not_push_out_what_was_learned_here() -> None:
    ceilings, clock = lowered_to_eight()
    others: dict[Place, Ceiling] = {
        ((TensorKey("x", "<f4", (9, length), b""),), "fp32"): Ceiling(
            rows=4, since_unix_s=clock.now_unix_s + length
        )
        for length in range(2 * MOST_SHAPES)
    }

    ceilings.learn(others)

    assert ceilings.of(SIZES) == {"fp32": 8}
    known = ceilings.everything()
    assert len(known) == MOST_SHAPES
    assert max(c.since_unix_s for c in known.values()) == max(
        c.since_unix_s for c in others.values()
    )
