"""Which axis of each tensor may count the rows: guesses, in the order they are tried.

A name says nothing for certain, and neither does a place; the probe decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from workers.adding.graph import Size
from workers.batching.stacking import Array

Axes: TypeAlias = dict[str, int | None]


def guesses(inputs: Mapping[str, Sequence[Size]]) -> list[Axes]:
    """Return what may be the batch axis of each input, the likeliest first."""
    found: list[Axes] = [{name: 0 if sizes else None for name, sizes in inputs.items()}]
    for free in _free_names(inputs):
        found.append({name: _place(sizes, free) for name, sizes in inputs.items()})
    # Exporters that name nothing, or each axis differently: the first free axis of each.
    found.append({name: _first_free(sizes) for name, sizes in inputs.items()})
    distinct: list[Axes] = []
    for axes in found:
        if axes not in distinct and any(axis is not None for axis in axes.values()):
            distinct.append(axes)
    return distinct


def grown_axes(one: Mapping[str, Array], two: Mapping[str, Array]) -> Axes:
    """Return the axis of each output that counts rows, told from the answers to one row and to two;
    ``None`` where no axis does.
    """
    return {name: _grown(one[name].shape, two[name].shape) for name in one}


def _grown(one: Sequence[int], two: Sequence[int]) -> int | None:
    sizes = list(zip(one, two, strict=False))
    return sizes.index((1, 2)) if (1, 2) in sizes else None


def _free_names(inputs: Mapping[str, Sequence[Size]]) -> list[str]:
    """Return the names of free sizes: those on earlier axes first."""
    places = [
        (axis, number, size)
        for number, sizes in enumerate(inputs.values())
        for axis, size in enumerate(sizes)
        if isinstance(size, str) and size
    ]
    return list(dict.fromkeys(name for _, _, name in sorted(places)))


def _place(sizes: Sequence[Size], name: str) -> int | None:
    return list(sizes).index(name) if name in sizes else None


def _first_free(sizes: Sequence[Size]) -> int | None:
    return next((axis for axis, size in enumerate(sizes) if isinstance(size, str)), None)
