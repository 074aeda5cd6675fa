"""What the process of an instance loads first."""

from __future__ import annotations

import pytest

from workers.instances.instance import Instance, Kind
from workers.parent.slots import Slot, first_models


def slot(number: int, *, failures: int = 0) -> Slot:
    return Slot(
        number=number, instance=Instance(kind=Kind.CPU, uuid="cpu", slot=number), failures=failures
    )


@pytest.mark.parametrize(
    ("failures", "loadable", "first"),
    [
        pytest.param((0, 0), {"old"}, ("old", "new"), id="all"),
        pytest.param((1, 0), {"old"}, ("old", "new"), id="all again in a slot that fails alone"),
        pytest.param((0, 1), {"old"}, ("old",), id="what was loaded where another fails"),
        pytest.param((1, 1), {"old"}, ("old",), id="the same where both fail"),
        pytest.param((0, 1), set(), ("old", "new"), id="all where nothing ever was"),
    ],
)
def test_a_process_loads_nothing_untried_while_loads_end_others(
    failures: tuple[int, int], loadable: set[str], first: tuple[str, ...]
) -> None:
    slots = [slot(number, failures=count) for number, count in enumerate(failures)]

    assert first_models(slots[0], slots, ("old", "new"), loadable) == first
