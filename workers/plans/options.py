"""What a model's file says about its plans: the table [plans], and the sizes of its inputs."""

from __future__ import annotations

import dataclasses
from typing import Final, TypeGuard

from workers.tables import Table

#: TensorRT's own choice; 5 looks longest for fast kernels.
_OPTIMIZATION_LEVEL: Final = 3
_HIGHEST_LEVEL: Final = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRange:
    """The least and the largest shape of one row of an input, with its batch axis."""

    least: tuple[int, ...]
    largest: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How the plans of one model are made."""

    #: The batch sizes with a profile of their own; empty: a few up to `max_batch_size`.
    rows: tuple[int, ...] = ()
    #: Whether fp32 may be rounded to TF32 inside: much faster, and about three digits.
    tf32: bool = False
    #: Scratch memory that a kernel may take; ``None``: what the GPU has.
    workspace_bytes: int | None = None
    #: 0 builds fastest, 5 runs fastest.
    optimization_level: int = _OPTIMIZATION_LEVEL


def read_plan_options(table: Table, *, max_batch_size: int) -> PlanOptions:
    """Return what the table [plans] of a model's file says."""
    plans = table.table("plans")
    options = PlanOptions(
        rows=_rows(plans, max_batch_size),
        tf32=_switch(plans, "tf32"),
        workspace_bytes=_workspace(plans),
        optimization_level=_level(plans),
    )
    plans.finish()
    return options


def read_shape_range(tensor: Table) -> ShapeRange | None:
    """Return the sizes that one input may have; ``None`` when its file says nothing of them."""
    least, largest = _shape(tensor, "min_shape"), _shape(tensor, "max_shape")
    if least is None and largest is None:
        return None
    if least is None or largest is None or len(least) != len(largest):
        raise tensor.error(
            "max_shape", "and min_shape go together: both are whole shapes of one row."
        )
    if any(small > large for small, large in zip(least, largest, strict=True)):
        raise tensor.error("min_shape", f"is {list(least)}, above max_shape {list(largest)}.")
    return ShapeRange(least=least, largest=largest)


def _rows(plans: Table, max_batch_size: int) -> tuple[int, ...]:
    listed = plans.raw("rows")
    if listed is None:
        return ()
    if not _is_sizes(listed) or sorted(set(listed)) != listed:
        raise plans.error("rows", f"must list growing batch sizes, as [1, 8, 32], not {listed!r}.")
    if listed[-1] != max_batch_size:
        raise plans.error("rows", f"must end with max_batch_size, which is {max_batch_size}.")
    return tuple(listed)


def _switch(plans: Table, key: str) -> bool:
    value = plans.raw(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise plans.error(key, f"must be true or false, not {value!r}.")


def _workspace(plans: Table) -> int | None:
    if "workspace_bytes" not in plans:
        plans.raw("workspace_bytes")
        return None
    return plans.whole("workspace_bytes", 0, least=1)


def _level(plans: Table) -> int:
    level = plans.whole("optimization_level", _OPTIMIZATION_LEVEL)
    if level > _HIGHEST_LEVEL:
        raise plans.error("optimization_level", f"must be 0 to {_HIGHEST_LEVEL}, not {level}.")
    return level


def _shape(tensor: Table, key: str) -> tuple[int, ...] | None:
    shape = tensor.raw(key)
    if shape is None:
        return None
    if not _is_sizes(shape):
        raise tensor.error(key, f"must list the sizes of one row, as [1, 8], not {shape!r}.")
    return tuple(shape)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(size) is int and size > 0 for size in value)
    )
