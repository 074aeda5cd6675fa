"""Jobs of different lengths in one run: what they are padded to, and how answers are cut back.

Pure arithmetic on shapes and arrays. That padding changes no answer is for the probe to prove.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from workers.batching.shapes import ShapeKey, TensorKey
from workers.batching.stacking import Array, rows_between

#: The size of the padded axis of each padded input.
Lengths: TypeAlias = Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pad:
    """How one input is padded, as its model's file says."""

    axis: int
    value: float = 0
    #: The sizes to pad to; empty: as long as the longest of a run.
    to: tuple[int, ...] = ()

    def rounded(self, size: int) -> int:
        """Return the size to pad to; what is longer than all of them stays as it is."""
        return next((longer for longer in self.to if longer >= size), size)

    @property
    def text(self) -> str:
        """Return it in words."""
        where = f"to {', '.join(map(str, self.to))}" if self.to else "to the longest of a run"
        return f"axis {self.axis} {where}, with {self.value:g}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """What makes one input as long as its run wants it."""

    axis: int
    size: int
    value: float

    def __call__(self, array: Array) -> Array:
        """Return ``array`` with the value behind it; itself where it is long enough."""
        own = array.shape[self.axis]
        if own >= self.size:
            return array
        shape = (*array.shape[: self.axis], self.size, *array.shape[self.axis + 1 :])
        wide = np.full(shape, self.value, array.dtype)
        rows_between(wide, self.axis, 0, own)[...] = array
        return wide


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """The padding of one model, as the probe has proved it; made of nothing it pads nothing."""

    pads: Mapping[str, Pad] = dataclasses.field(default_factory=dict)
    batch_axes: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    #: Inputs that have one length in every job, such as token ids and their mask.
    together: tuple[tuple[str, ...], ...] = ()
    #: The axes of each output that are as long as an input, and that input.
    cuts: Mapping[str, tuple[tuple[int, str], ...]] = dataclasses.field(default_factory=dict)

    def lengths(self, arrays: Mapping[str, Array]) -> dict[str, int]:
        """Return how long one job's padded inputs are."""
        return {name: arrays[name].shape[pad.axis] for name, pad in self.pads.items()}

    def rounded(self, key: ShapeKey) -> ShapeKey:
        """Return the shape that a job is padded to, where its model's file lists sizes."""
        sizes = {name: pad.rounded(self._size(key, name)) for name, pad in self.pads.items()}
        return self._with_sizes(key, sizes)

    def opened(self, key: ShapeKey) -> ShapeKey:
        """Return ``key`` without the sizes that the longest job of a run decides."""
        return self._with_sizes(key, {name: 0 for name, pad in self.pads.items() if not pad.to})

    def longest(self, first: ShapeKey, second: ShapeKey) -> ShapeKey:
        """Return the shape that holds a row of both."""
        sizes = {name: max(self._size(first, name), self._size(second, name)) for name in self.pads}
        return self._with_sizes(first, sizes)

    def fills(self, key: ShapeKey) -> dict[str, Fill]:
        """Return what widens the inputs of jobs to a run of that shape."""
        return self.fills_to({name: self._size(key, name) for name in self.pads})

    def fills_to(self, lengths: Lengths) -> dict[str, Fill]:
        """Return what widens the inputs of jobs to those lengths."""
        return {
            name: Fill(axis=pad.axis, size=lengths[name], value=pad.value)
            for name, pad in self.pads.items()
        }

    def cut(self, answer: Mapping[str, Array], lengths: Lengths) -> dict[str, Array]:
        """Return an answer without what belongs to the padding."""
        found = dict(answer)
        for name, axes in self.cuts.items():
            for axis, like in axes:
                found[name] = rows_between(found[name], axis, 0, lengths[like])
        return found

    def _size(self, key: ShapeKey, name: str) -> int:
        tensor = next(tensor for tensor in key if tensor.name == name)
        return tensor.shape[self._place(name)]

    def _place(self, name: str) -> int:
        """Return where the padded axis is in a shape without its batch axis."""
        axis, batch_axis = self.pads[name].axis, self.batch_axes[name]
        return axis - (batch_axis is not None and batch_axis < axis)

    def _with_sizes(self, key: ShapeKey, sizes: Lengths) -> ShapeKey:
        if not sizes:
            return key
        return tuple(
            _with_size(tensor, self._place(tensor.name), sizes[tensor.name])
            if tensor.name in sizes
            else tensor
            for tensor in key
        )


def widened(arrays: Mapping[str, Array], fills: Mapping[str, Fill]) -> dict[str, Array]:
    """Return all inputs of a job, those with a fill as long as it says."""
    return {name: fills[name](array) if name in fills else array for name, array in arrays.items()}


def followed(
    short: Sequence[int], long: Sequence[int], lengths: Lengths, padded: Lengths
) -> tuple[tuple[int, str], ...]:
    """Return the axes of an output that grew with an input, and that input.

    ``ValueError`` for one that grew otherwise: nobody knows what of it belongs to the padding.
    """
    if len(short) != len(long):
        raise ValueError(f"has shape {list(long)} padded and {list(short)} as it is")
    grown = (axis for axis, sizes in enumerate(zip(short, long, strict=True)) if len({*sizes}) > 1)
    return tuple((axis, _like(short[axis], long[axis], axis, lengths, padded)) for axis in grown)


def _like(short: int, long: int, axis: int, lengths: Lengths, padded: Lengths) -> str:
    for name, length in lengths.items():
        if (short, long) == (length, padded[name]):
            return name
    raise ValueError(f"has {long} on axis {axis} padded and {short} as it is: no input's length")


def _with_size(tensor: TensorKey, place: int, size: int) -> TensorKey:
    shape = tensor.shape
    return tensor._replace(shape=(*shape[:place], size, *shape[place + 1 :]))


def alike(lengths: Lengths) -> tuple[tuple[str, ...], ...]:
    """Return the inputs in groups of equal length."""
    found: dict[int, list[str]] = {}
    for name, length in lengths.items():
        found.setdefault(length, []).append(name)
    return tuple(tuple(group) for group in found.values())
