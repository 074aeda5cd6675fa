"""What a model's file says of each input and output: its axes, sizes, and values to be tried."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeGuard

from workers.batching.padding import Pad
from workers.plans.options import ShapeRange, read_shape_range
from workers.tables import Table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProbeHint:
    """What the load-time probe cannot guess about an input."""

    #: The whole shape of one row; ``None``: free axes are guessed.
    shape: tuple[int, ...] | None = None
    #: The largest value the probe may send; inputs without a batch axis are filled with it.
    largest: float = 1.0
    #: The least; jobs send nothing below it, nor above ``largest``. ``None``: nobody said.
    least: float | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class Inputs:
    """The table [inputs]: for each key the inputs that have it."""

    batch_axes: dict[str, int | None] = dataclasses.field(default_factory=dict)
    hints: dict[str, ProbeHint] = dataclasses.field(default_factory=dict)
    ranges: dict[str, ShapeRange] = dataclasses.field(default_factory=dict)
    pads: dict[str, Pad] = dataclasses.field(default_factory=dict)


def read_inputs(table: Table) -> Inputs:
    """Return what is declared below [inputs]."""
    found, tensors = Inputs(), table.table("inputs")
    for name in tensors.names():
        tensor = tensors.table(name)
        if "batch_axis" in tensor:
            found.batch_axes[name] = _batch_axis(tensor)
        shape, largest = _probe_shape(tensor), tensor.number("probe_max", 1.0)
        least = _probe_min(tensor, largest)
        found.hints[name] = ProbeHint(shape=shape, largest=largest, least=least)
        if sizes := read_shape_range(tensor):
            found.ranges[name] = sizes
        if "pad" in tensor:
            found.pads[name] = _pad(tensor.table("pad"))
        tensor.raw("pad")
        _finish(tensor)
    return found


def read_outputs(table: Table) -> dict[str, int | None]:
    """Return the batch axes declared below [outputs]."""
    axes: dict[str, int | None] = {}
    tensors = table.table("outputs")
    for name in tensors.names():
        tensor = tensors.table(name)
        if "batch_axis" in tensor:
            axes[name] = _batch_axis(tensor)
        _finish(tensor)
    return axes


def _batch_axis(tensor: Table) -> int | None:
    axis = tensor.raw("batch_axis")
    if axis == "none":
        return None
    if not isinstance(axis, int) or isinstance(axis, bool) or axis < 0:
        raise tensor.error("batch_axis", f'must be 0, 1, ... or "none", not {axis!r}.')
    return axis


def _finish(tensor: Table) -> None:
    # So that it is among the known keys that an unknown one may have been meant as.
    tensor.raw("batch_axis")
    tensor.finish()


def _pad(pad: Table) -> Pad:
    axis, value, to = pad.raw("axis"), pad.raw("value"), pad.raw("to")
    if not isinstance(axis, int) or isinstance(axis, bool) or axis < 0:
        raise pad.error("axis", f"must be the axis that is padded, as 1, not {axis!r}.")
    if not isinstance(value, int | float):
        raise pad.error("value", f"must be what an input is filled with, as 0, not {value!r}.")
    if to is not None and not _grows(to):
        raise pad.error("to", f"must list growing sizes, as [16, 32, 64, 128], not {to!r}.")
    pad.finish()
    return Pad(axis=axis, value=value, to=tuple(to or ()))


def _grows(sizes: object) -> TypeGuard[list[int]]:
    return (
        isinstance(sizes, list)
        and bool(sizes)
        and all(type(size) is int and size > 0 for size in sizes)
        and sorted(set(sizes)) == sizes
    )


def _probe_shape(tensor: Table) -> tuple[int, ...] | None:
    shape = tensor.raw("probe_shape")
    if shape is None:
        return None
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        raise tensor.error(
            "probe_shape", f"must list the sizes of one row, such as [1, 8], not {shape!r}."
        )
    return tuple(shape)


def _probe_min(tensor: Table, largest: float) -> float | None:
    least = tensor.raw("probe_min")
    if least is None:
        return None
    if not isinstance(least, int | float) or isinstance(least, bool) or not -math.inf < least:
        raise tensor.error("probe_min", f"must be the least number of a job, not {least!r}.")
    if least >= largest:
        raise tensor.error("probe_min", f"is {least:g}, not below probe_max, {largest:g}.")
    return least
