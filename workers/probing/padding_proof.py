"""The load-time proof that padding changes no answer: rows of different lengths are run as they
are, padded by little and by much, and together; each answer, cut back, must be the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from producer.contract.errors import ConfigError, OutOfMemory
from workers.batching.padding import Lengths, Pad, Padding, followed, widened
from workers.batching.pieces import Piece
from workers.batching.stacking import Array, rows_between, split, stack
from workers.error_text import one_line
from workers.models import ModelSpec, TensorSpec
from workers.probing.difference import difference, says_nothing
from workers.probing.masks import masks_among
from workers.probing.own_lengths import lengths_of_their_own, unlike_lengths
from workers.probing.rows_against_padding import Rows, rows_elsewhere, rows_unlike_padding
from workers.tables import nearest

Run: TypeAlias = Callable[[Mapping[str, Array]], dict[str, Array]]

#: How long the rows are, as parts of the one that ran first: odd sizes show what counts in steps.
_PARTS: Final = (1.0, 0.65, 0.2)


#: How little of the tolerance shows that a mask lets another number through.
_MASK_SHARE: Final = 0.01


class Unproved(Exception):
    """Why a model is not padded."""


def check_pads(spec: ModelSpec, inputs: Sequence[TensorSpec]) -> None:
    """Refuse what the model's file says of padding and its inputs cannot mean."""
    known = {tensor.name: tensor for tensor in inputs}
    for name, pad in spec.pads.items():
        if name not in known:
            raise ConfigError(
                f"{spec.name}: the model has no input {name!r}.{nearest(name, known)}"
            )
        tensor = known[name]
        if tensor.batch_axis is None or pad.axis == tensor.batch_axis:
            raise ConfigError(
                f"{spec.name}: pad of input {name!r} needs another axis beside the one that counts "
                f"rows, which is {'none' if tensor.batch_axis is None else tensor.batch_axis}."
            )
        if pad.axis >= len(tensor.shape):
            raise ConfigError(
                f"{spec.name}: input {name!r} has {len(tensor.shape)} axes; pad names axis "
                f"{pad.axis}."
            )
        if not _can_hold(tensor.dtype, pad.value):
            raise ConfigError(
                f"{spec.name}: input {name!r} is {tensor.dtype}; it cannot hold {pad.value:g}, the "
                "value of its pad."
            )


def _can_hold(dtype: str, value: float) -> bool:
    if np.dtype(dtype).kind not in "iu":
        return True
    limits = np.iinfo(dtype)
    return limits.min <= value <= limits.max and value == int(value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A row, and what it is answered alone and as it is."""

    row: Mapping[str, Array]
    lengths: Lengths
    answer: Mapping[str, Array]


def prove(
    run: Run,
    spec: ModelSpec,
    row: Mapping[str, Array],
    *,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    together: bool,
    tolerance: float,
    checks_numbers: bool,
) -> Padding:
    """Return how jobs may be padded; ``Unproved`` says why they may not.

    ``row`` is one that ran. ``together``: whether rows may share a run. ``checks_numbers``: whether
    an engine refuses integers that its tables do not have.
    """
    _check_free(spec, inputs)
    groups = lengths_of_their_own(run, row, spec.pads)
    proof = _Proof(
        run,
        Padding(
            pads=spec.pads,
            batch_axes={tensor.name: tensor.batch_axis for tensor in inputs},
            together=groups,
            cuts={},
        ),
        axes_out={tensor.name: tensor.batch_axis for tensor in outputs},
        tolerance=tolerance,
        lengths=unlike_lengths(row, spec.pads, groups),
        together=together,
    )

    def elsewhere(rows: Rows, *names: str) -> Iterator[Rows]:
        pads = {name: spec.pads[name] for name in names}
        return rows_elsewhere(inputs, spec.probe_hints, rows, pads, wider_integers=checks_numbers)

    rows = rows_unlike_padding(inputs, spec.probe_hints, row, spec.pads, count=len(_PARTS))
    _try_all(proof, rows, elsewhere)
    if not proof.tried:
        raise Unproved(proof.why_untried)
    if not proof.told_apart:
        raise Unproved(
            "all made-up rows are answered alike, which proves nothing; give probe_min, probe_max"
        )
    return proof.padding


def _check_free(spec: ModelSpec, inputs: Sequence[TensorSpec]) -> None:
    for tensor in inputs:
        pad = spec.pads.get(tensor.name)
        if pad is not None and tensor.shape[pad.axis] is not None:
            raise Unproved(f"axis {pad.axis} of input {tensor.name!r} takes one size alone")


def _try_all(proof: _Proof, rows: Rows, elsewhere: Callable[..., Iterator[Rows]]) -> None:
    """Try the rows, and then with other numbers in every input that is no mask."""
    proof.try_rows(rows)
    masks = proof.masks(elsewhere)
    for moved in elsewhere(rows, *(name for name in proof.padding.pads if name not in masks)):
        try:
            proof.try_rows(moved)
        except Unproved as unproved:
            raise Unproved(f"{unproved}, {_where(rows, moved)}") from None


def _where(plain: Rows, moved: Rows) -> str:
    """Return which numbers changed an answer, and what says that no job sends them."""
    found = {
        name: (min(row[name].min() for row in moved), max(row[name].max() for row in moved))
        for name in plain[0]
        if moved[0][name] is not plain[0][name]
    }
    said = ", ".join(
        f"{name!r} from {least:.3g} to {most:.3g}" for name, (least, most) in found.items()
    )
    return f"with {said}; where jobs send no such numbers, give probe_min and probe_max there"


class _Proof:
    """The runs of one proof, and what they have shown."""

    def __init__(
        self,
        run: Run,
        padding: Padding,
        *,
        axes_out: Mapping[str, int | None],
        tolerance: float,
        lengths: Lengths,
        together: bool,
    ) -> None:
        self._run, self._lengths, self._together = run, lengths, together
        self._axes_out, self._tolerance = axes_out, tolerance
        self.padding = padding
        #: Padded runs that were answered as without padding.
        self.tried = 0
        #: Why rows were not padded.
        self._untried: list[str] = []
        #: A row of which every input was padded, and to what.
        self._padded: tuple[_Case, Lengths] | None = None
        self._first: Mapping[str, Array] | None = None
        #: Whether any two rows were answered otherwise.
        self.told_apart = False

    def try_rows(self, rows: Rows) -> None:
        """Run the rows as they are, at several lengths, then padded, then together."""
        cases = self._cases(rows)
        for case in cases:
            self._first = self._first or case.answer
            self.told_apart = self.told_apart or _tells_apart(self._first, case.answer)
            for longer in _targets(case.lengths, self.padding.pads):
                self._try_padded(case, longer)
        if self._together and len(cases) > 1:
            self._try_together(cases)

    @property
    def why_untried(self) -> str:
        """Return why nothing was padded."""
        return next(iter(self._untried), "no made-up row is shorter than the sizes to pad to")

    def masks(self, elsewhere: Callable[[Rows, str], Iterator[Rows]]) -> frozenset[str]:
        """Return the inputs whose padding says that the padding of others counts not.

        ``elsewhere`` yields rows with other numbers in the input of that name.
        """
        if self._padded is None or len(self.padding.pads) == 1:
            return frozenset()
        case, longer = self._padded

        def answered(row: Mapping[str, Array], names: Iterable[str]) -> dict[str, Array] | None:
            fills = self.padding.fills_to(longer)
            other = {n: dataclasses.replace(fills[n], value=not fills[n].value) for n in names}
            try:
                answer = self._run(widened(row, {**fills, **other}))
            except Exception:  # noqa: BLE001 - an engine of one's own may raise anything
                return None
            return self.padding.cut(answer, case.lengths)

        rows = {
            name: [case.row, *(moved for (moved,) in elsewhere([dict(case.row)], name))]
            for name in self.padding.pads
        }
        return masks_among(rows, case.row, answered, tolerance=self._tolerance * _MASK_SHARE)

    def _cases(self, rows: Sequence[Mapping[str, Array]]) -> list[_Case]:
        """Return the rows that run as they are, each of another length."""
        cases: list[_Case] = []
        for row, part in zip(rows, _PARTS, strict=True):
            own = {
                name: _part(self._lengths[name], pad, part)
                for name, pad in self.padding.pads.items()
            }
            short = {
                name: rows_between(array, self.padding.pads[name].axis, 0, own[name])
                if name in own
                else array
                for name, array in row.items()
            }
            groups = {own[group[0]] for group in self.padding.together}
            if len(groups) < len(self.padding.together) or any(c.lengths == own for c in cases):
                continue
            try:
                answer = self._run(short)
            except Exception as error:  # noqa: BLE001 - a size that the model does not take
                self._untried.append(
                    "shorter rows are refused as they are; inputs that are equally long need a pad "
                    f"each: {one_line(error)}"
                )
                continue
            if says_nothing(answer):
                self._untried.append("made-up rows are answered with nothing but NaN")
                continue
            cases.append(_Case(row=short, lengths=own, answer=answer))
        return cases

    def _try_padded(self, case: _Case, longer: Lengths) -> None:
        """Run one row padded; learn which outputs grow with it."""
        answer = self._answered(widened(case.row, self.padding.fills_to(longer)))
        cuts = {}
        for name, array in answer.items():
            try:
                found = followed(case.answer[name].shape, array.shape, case.lengths, longer)
            except ValueError as error:
                raise Unproved(f"output {name!r} {error}") from None
            if found:
                cuts[name] = found
        if self.tried and cuts != self.padding.cuts:
            raise Unproved("its outputs do not always grow on the same axes")
        self.padding = dataclasses.replace(self.padding, cuts=cuts)
        if self._padded is None and all(longer[name] > case.lengths[name] for name in longer):
            self._padded = (case, longer)
        self._compare(case, answer)

    def _try_together(self, cases: Sequence[_Case]) -> None:
        """Run rows of different lengths as one batch."""
        pieces = [Piece(job=job, start=0, stop=1) for job in range(len(cases))]
        longest = {
            name: pad.rounded(max(case.lengths[name] for case in cases))
            for name, pad in self.padding.pads.items()
        }
        rows = [case.row for case in cases]
        fills = self.padding.fills_to(longest)
        answer = self._answered(stack(rows, pieces, self.padding.batch_axes, fills))
        try:
            answers = split(answer, pieces, self._axes_out)
        except ValueError as error:
            raise Unproved(str(error)) from None
        for case, part in zip(cases, answers, strict=True):
            self._compare(case, part)

    def _compare(self, case: _Case, padded: Mapping[str, Array]) -> None:
        found = self.padding.cut(padded, case.lengths)
        if changed := difference(case.answer, found, tolerance=self._tolerance):
            raise Unproved(f"padding changes answers: {changed}")
        self.tried += 1

    def _answered(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        try:
            return self._run(feeds)
        except (OutOfMemory, MemoryError):
            raise Unproved("padded rows do not fit in memory") from None
        except Exception as error:
            raise Unproved(f"padded rows are refused: {one_line(error)}") from error


def _tells_apart(first: Mapping[str, Array], second: Mapping[str, Array]) -> bool:
    """Return whether two answers differ where both have numbers."""
    for name, one in first.items():
        both = tuple(map(slice, map(min, one.shape, second[name].shape)))
        same_nan = one.dtype.kind == "f"
        if not np.array_equal(one[both], second[name][both], equal_nan=same_nan):
            return True
    return False


def _part(length: int, pad: Pad, part: float) -> int:
    """Return the size of a made-up row that some size can be padded to."""
    longest = min(length, *pad.to[-1:], length)
    return max(1, int(longest * part))


def _targets(lengths: Lengths, pads: Mapping[str, Pad]) -> Iterator[Lengths]:
    """Yield what a row is padded to: the nearest size, and one that is mostly padding."""
    near, far = {}, {}
    for name, pad in pads.items():
        longer = [size for size in pad.to if size > lengths[name]] or [lengths[name]]
        near[name], far[name] = longer[0], longer[-1]
        if not pad.to:
            near[name], far[name] = lengths[name] + 1, 3 * lengths[name]
    for target in (near, far):
        if target != lengths:
            yield target
