"""Which padded inputs may differ in length within one job, as a query and a passage do, and which
may not, as token ids and their mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Final, TypeAlias

from workers.batching.padding import Lengths, Pad, alike
from workers.batching.stacking import Array, rows_between

Run: TypeAlias = Callable[[Mapping[str, Array]], object]

#: How long an input is that is tried shorter than the others, or next to one of its length.
_SHORTER: Final = 0.7

#: Of more inputs of one length not every group is tried.
_MOST_INPUTS: Final = 6


def lengths_of_their_own(
    run: Run, row: Mapping[str, Array], pads: Mapping[str, Pad]
) -> tuple[tuple[str, ...], ...]:
    """Return the padded inputs in groups: the fewest that run shorter than the others, and longer.

    Both, since some models take a mask that is longer than the ids.
    """
    groups: list[tuple[str, ...]] = []
    for same in alike({name: row[name].shape[pad.axis] for name, pad in pads.items()}):
        left = same
        while left:
            groups.append(_fewest_shorter(run, row, pads, left))
            left = tuple(name for name in left if name not in groups[-1])
    return tuple(groups)


def unlike_lengths(
    row: Mapping[str, Array], pads: Mapping[str, Pad], groups: Sequence[Sequence[str]]
) -> Lengths:
    """Return how long made-up rows may be: no two groups alike, so that what grows with one is not
    taken for what grows with another.
    """
    lengths: dict[str, int] = {}
    for group in groups:
        size = min(min([row[n].shape[pads[n].axis], *pads[n].to[-1:]]) for n in group)
        while size in lengths.values() and size > 1:
            size = int(size * _SHORTER)
        lengths |= dict.fromkeys(group, size)
    return lengths


def _fewest_shorter(
    run: Run, row: Mapping[str, Array], pads: Mapping[str, Pad], names: tuple[str, ...]
) -> tuple[str, ...]:
    first, *others = names
    if len(names) > _MOST_INPUTS:
        return names
    for count in range(len(others)):
        for some in combinations(others, count):
            apart = (first, *some)
            rest = [name for name in names if name not in apart]
            if _runs_shorter(run, row, pads, apart) and _runs_shorter(run, row, pads, rest):
                return apart
    return names


def _runs_shorter(
    run: Run, row: Mapping[str, Array], pads: Mapping[str, Pad], names: Sequence[str]
) -> bool:
    short = dict(row)
    for name in names:
        axis = pads[name].axis
        size = int(row[name].shape[axis] * _SHORTER)
        # One step would be repeated beside more of them.
        if size < 2:
            return False
        short[name] = rows_between(row[name], axis, 0, size)
    try:
        run(short)
    except Exception:  # noqa: BLE001 - an engine of one's own may raise anything
        return False
    return True
