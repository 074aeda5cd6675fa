"""How `fleet queue` says an age and who serves a queue."""

from __future__ import annotations

import pytest

from producer.commands.queue import age, served_by
from producer.contract.queues import Served


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (10, "10 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7200, "2 h"),
        (86_400 * 30, "30 days"),
    ],
)
def test_an_age_is_said_in_the_largest_unit_that_has_two(seconds: float, said: str) -> None:
    assert age(seconds) == said


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (Served(), "nobody at the moment"),
        (Served(workers=1), "1 worker, no instance ready yet"),
        (Served(workers=1, ready=1), "1 instance of 1 worker"),
        (Served(workers=2, ready=5), "5 instances of 2 workers"),
    ],
)
def test_who_serves_a_queue_is_said_in_words(served: Served, said: str) -> None:
    assert served_by(served) == said
