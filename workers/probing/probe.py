"""The load-time probe: whether rows of different jobs may share a run of an engine.

A dynamic first axis is not always the batch, and it can lie. So one row is run twice, another
one once, then both together; only if shapes and values agree may rows share a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from producer.contract.errors import ConfigError, EngineFailed, OutOfMemory
from workers.batching.padding import Padding
from workers.batching.pieces import Piece
from workers.batching.stacking import Array, split, stack
from workers.error_text import one_line
from workers.models import ModelSpec, TensorSpec
from workers.probing.difference import difference, moved_by, says_nothing, tolerance_of
from workers.probing.made_up_rows import rows_to_try
from workers.probing.padding_proof import Unproved, check_pads, prove
from workers.tables import nearest

#: How little of the tolerance an answer may change with the company of its row.
_TWIN_SHARE: Final = 0.01

#: Why rows do not share a run.
_NOTHING: Final = (
    "made-up rows are answered with nothing but NaN, which proves nothing; give probe_max or "
    "probe_shape below [inputs.<name>]"
)
_INFLUENCE: Final = "rows influence each other"
_NUMBER: Final = "the number of rows in a run changes answers, though no row changes another's"

_ONE: Final = (Piece(job=0, start=0, stop=1),)
_TWO: Final = (Piece(job=0, start=0, stop=1), Piece(job=1, start=0, stop=1))


#: Runs an engine once.
Run: TypeAlias = Callable[[Mapping[str, Array]], dict[str, Array]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How rows may share a run."""

    max_rows: int
    #: Why that is less than the model's file asks for; empty when it is not.
    why: str = ""
    #: A job runs alone and uncut, because its rows may belong together.
    whole: bool = False
    #: How jobs of different lengths may share a run.
    padding: Padding = dataclasses.field(default_factory=Padding)
    #: Why the padding that the model's file asks for is off; empty when it is not.
    why_unpadded: str = ""
    #: How far answers to these rows change with the number of rows in a run, whatever the others
    #: are, as a share of their largest value; 0: they do not, or others matter.
    moved_by: float = 0.0
    #: The made-up row that ran.
    row: Mapping[str, Array] = dataclasses.field(default_factory=dict, repr=False, compare=False)


def declared(
    tensors: Sequence[TensorSpec], axes: Mapping[str, int | None], *, side: str, model: str
) -> tuple[TensorSpec, ...]:
    """Return ``tensors`` with the batch axes that the model's file declares."""
    known = [tensor.name for tensor in tensors]
    for name, axis in axes.items():
        if name not in known:
            raise ConfigError(f"{model}: the model has no {side} {name!r}.{nearest(name, known)}")
        rank = len(tensors[known.index(name)].shape)
        if axis is not None and axis >= rank:
            raise ConfigError(
                f"{model}: {side} {name!r} has {rank} axes; batch_axis {axis} is not among them."
            )
    return tuple(
        dataclasses.replace(tensor, batch_axis=axes.get(tensor.name, tensor.batch_axis))
        for tensor in tensors
    )


def probe(
    run: Run,
    spec: ModelSpec,
    *,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    precision: str,
    checks_numbers: bool = True,
) -> Batching:
    """Return how rows may share a run of an engine, found out by running it.

    ``checks_numbers``: whether it refuses integers that its tables do not have.

    ``EngineFailed`` when not even one row runs: such a model would fail every job.
    """
    check_pads(spec, inputs)
    rows, first = _first_answer(run, spec, inputs, precision)
    found = _batching(run, spec, rows, first, inputs=inputs, outputs=outputs, precision=precision)
    found = dataclasses.replace(found, row=rows[0])
    if not spec.pads:
        return found
    if found.whole:
        return dataclasses.replace(found, why_unpadded="rows may belong together")
    try:
        padding = prove(
            run,
            spec,
            rows[0],
            inputs=inputs,
            outputs=outputs,
            together=found.max_rows > 1,
            tolerance=tolerance_of(spec, precision),
            checks_numbers=checks_numbers,
        )
    except Unproved as unproved:
        return dataclasses.replace(found, why_unpadded=str(unproved))
    return dataclasses.replace(found, padding=padding)


def _batching(
    run: Run,
    spec: ModelSpec,
    rows: Sequence[Mapping[str, Array]],
    first: Mapping[str, Array],
    *,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    precision: str,
) -> Batching:
    """Return how rows may share a run, given two and the answer to the first."""
    axes_in = {tensor.name: tensor.batch_axis for tensor in inputs}
    axes_out = {tensor.name: tensor.batch_axis for tensor in outputs}
    unsure = _why_one_job(inputs, axes_in) or _why_not_rows(
        first, run(rows[0]), axes_out, tolerance=tolerance_of(spec, precision)
    )
    if unsure:
        return Batching(max_rows=1, why=unsure, whole=True)
    if fixed := [tensor.name for tensor in inputs if _batch_size(tensor) == 1]:
        return Batching(max_rows=1, why=f"input {fixed[0]!r} takes exactly one row")
    try:
        alone = (first, run(rows[1]))
        both = run(stack(rows, _TWO, axes_in))
    except OutOfMemory:
        return Batching(max_rows=1, why="two rows do not fit in memory")
    except Exception as error:  # noqa: BLE001 - an engine of one's own may raise anything
        return Batching(max_rows=1, why=f"two rows are refused: {one_line(error)}")
    why = _why_not_together(alone, both, axes_out, tolerance=tolerance_of(spec, precision))
    # In another precision such an answer is looked at, and given up, at every run.
    proved = precision != spec.precision or not any(map(says_nothing, alone))
    if not why and proved:
        return Batching(max_rows=spec.max_batch_size)
    by_number = proved and not _others_matter(
        run, rows, both, axes_in, axes_out, tolerance=spec.tolerance
    )
    return Batching(
        max_rows=1,
        why=why.replace(_INFLUENCE, _NUMBER) if by_number else why or _NOTHING,
        # Without a declaration this axis may be time or nodes, so a job is not cut.
        whole=not all(name in spec.batch_axes_in for name in axes_in),
        moved_by=_moved_by(alone, both, axes_out) if by_number else 0.0,
    )


def strictest(found: Sequence[Batching]) -> Batching:
    """Return what holds for all engines of a model, since any of them may answer a batch."""
    least = min(found, key=lambda batching: (not batching.whole, batching.max_rows))
    why_unpadded = next((b.why_unpadded for b in found if b.why_unpadded), "")
    if any(batching.padding != found[0].padding for batching in found):
        why_unpadded = why_unpadded or "the outputs of its engines grow on different axes"
    return dataclasses.replace(
        least,
        max_rows=min(batching.max_rows for batching in found),
        padding=Padding() if why_unpadded else found[0].padding,
        why_unpadded=why_unpadded,
    )


def _why_one_job(inputs: Sequence[TensorSpec], axes: Mapping[str, int | None]) -> str:
    """Return why a run holds one job, as far as the inputs' shapes tell."""
    if all(axis is None for axis in axes.values()):
        return "no input has a batch axis"
    for tensor in inputs:
        size = _batch_size(tensor)
        if size is not None and size > 1:
            return (
                f"axis {tensor.batch_axis} of input {tensor.name!r} is fixed at {size}; if another "
                "axis counts rows, declare it as batch_axis"
            )
    return ""


def _why_not_rows(
    answer: Mapping[str, Array],
    again: Mapping[str, Array],
    axes: Mapping[str, int | None],
    *,
    tolerance: float,
) -> str:
    """Return why answers to one row, given twice, cannot be compared or cut."""
    if differs := difference(answer, again, tolerance=tolerance):
        return f"the same row is answered differently each time: {differs}"
    try:
        split(answer, _ONE, axes)
    except ValueError as error:
        return str(error)
    return ""


def _why_not_together(
    alone: Sequence[Mapping[str, Array]],
    both: Mapping[str, Array],
    axes: Mapping[str, int | None],
    *,
    tolerance: float,
) -> str:
    """Return why the answer to two rows is not the two answers to one row each."""
    try:
        parts = split(both, _TWO, axes)
    except ValueError as error:
        return str(error)
    for expected, part in zip(alone, parts, strict=True):
        if differs := difference(expected, part, tolerance=tolerance):
            return f"{_INFLUENCE}: {differs}"
    return ""


def _moved_by(
    alone: Sequence[Mapping[str, Array]],
    both: Mapping[str, Array],
    axes: Mapping[str, int | None],
) -> float:
    return max(map(moved_by, alone, split(both, _TWO, axes)))


def _others_matter(
    run: Run,
    rows: Sequence[Mapping[str, Array]],
    both: Mapping[str, Array],
    axes_in: Mapping[str, int | None],
    axes_out: Mapping[str, int | None],
    *,
    tolerance: float,
) -> bool:
    """Return whether a row is answered otherwise when its own twin is beside it: then one row
    changes another's answer. Runtimes add in another order for another number of rows, which some
    models make much of; with as many rows the order is the same, and so is the answer.
    """
    try:
        twins = [run(stack([row, row], _TWO, axes_in)) for row in rows]
        beside_twin = [split(twin, _TWO, axes_out)[n] for n, twin in enumerate(twins)]
    except Exception:  # noqa: BLE001 - an engine of one's own may raise anything
        return True
    return bool(_why_not_together(beside_twin, both, axes_out, tolerance=tolerance * _TWIN_SHARE))


def _first_answer(
    run: Run, spec: ModelSpec, inputs: Sequence[TensorSpec], precision: str
) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    """Return two probe rows and the answer to the first, in the first size that runs."""
    refusal: Exception | None = None
    for rows in rows_to_try(inputs, spec.probe_hints):
        try:
            return rows, run(rows[0])
        except (OutOfMemory, MemoryError) as error:
            raise EngineFailed(
                f"{spec.name}: one row does not fit in memory in {precision}: {one_line(error)}"
            ) from error
        except Exception as error:  # noqa: BLE001 - an engine of one's own may raise anything
            refusal = refusal or error
    assert refusal is not None
    raise EngineFailed(
        f"{spec.name}: {precision} refuses one row of made-up values; give probe_shape and "
        f"probe_max below [inputs.<name>] if it needs others. {one_line(refusal)}"
    ) from refusal


def _batch_size(tensor: TensorSpec) -> int | None:
    """Return the size that the engine fixes for the batch axis, if it does."""
    return None if tensor.batch_axis is None else tensor.shape[tensor.batch_axis]
