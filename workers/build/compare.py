"""How answers of a variant differ from those of fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from producer.contract.errors import ConfigError
from workers.batching.stacking import Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One output of a variant beside the same output of fp32, over all rows."""

    rows: int
    max_abs: float
    mean_abs: float
    #: Between whole rows; ``None`` where an output holds no fractions.
    cosine_mean: float | None
    cosine_least: float | None
    #: Share of rows with the same largest entry (of an output of whole numbers: the same values);
    #: ``None`` where there is nothing to choose from.
    top1_agreement: float | None
    #: Values that are finite in fp32 and not here.
    not_finite: int


class Comparison:
    """Collects one output, batch by batch."""

    def __init__(self, axis: int | None) -> None:
        self._axis = axis
        self._rows = self._values = self._not_finite = 0
        self._max = self._sum = 0.0
        self._cosines: list[Array] = []
        self._same: list[Array] = []

    def add(self, expected: Array, found: Array) -> None:
        """Take in the answers to some rows."""
        axis = self._axis
        expected = expected[None] if axis is None else np.moveaxis(expected, axis, 0)
        found = found[None] if axis is None else np.moveaxis(found, axis, 0)
        finite = np.isfinite(expected)
        both = finite & np.isfinite(found)
        self._rows += len(expected)
        self._not_finite += int((finite & ~both).sum())
        wide = np.where(both, expected, 0).astype(np.float64)
        narrow = np.where(both, found, 0).astype(np.float64)
        apart = np.abs(wide - narrow)[both]
        self._values += apart.size
        self._sum += float(apart.sum())
        self._max = max(self._max, float(apart.max(initial=0.0)))
        if expected.dtype.kind == "f":
            self._cosines.append(_cosines(wide, narrow))
        if (same := _same(expected, found)) is not None:
            self._same.append(same)

    def difference(self) -> Difference:
        """Return what all rows together say."""
        cosines = np.concatenate(self._cosines) if self._cosines else None
        return Difference(
            rows=self._rows,
            max_abs=self._max,
            mean_abs=self._sum / max(1, self._values),
            cosine_mean=None if cosines is None else float(cosines.mean()),
            cosine_least=None if cosines is None else float(cosines.min()),
            top1_agreement=float(np.concatenate(self._same).mean()) if self._same else None,
            not_finite=self._not_finite,
        )


def accuracy(scores: Array, labels: Array, *, axis: int | None) -> float:
    """Return the share of rows whose largest entry is the labelled one."""
    scores = np.moveaxis(scores, axis or 0, 0)
    is_scores = scores.dtype.kind == "f" and scores.ndim > 1
    taken = scores.argmax(axis=-1) if is_scores else scores
    if taken.size != labels.size:
        raise ConfigError(
            f"labels of shape {list(labels.shape)} do not fit answers of shape "
            f"{list(scores.shape)}: each row has {taken.size // len(labels)}, not "
            f"{labels.size // len(labels)}. Labels are the places of the right classes."
        )
    return float((taken.reshape(len(labels), -1) == labels.reshape(len(labels), -1)).mean())


def why_refused(
    differences: Mapping[str, Difference], *, min_agreement: float, min_cosine: float
) -> str:
    """Return why a variant is not good enough, or nothing when it is."""
    for name, difference in differences.items():
        if difference.not_finite:
            return f"output {name!r} holds {difference.not_finite} values that are not finite"
        agreement, cosine = difference.top1_agreement, difference.cosine_mean
        if agreement is not None and agreement < min_agreement:
            return (
                f"output {name!r} agrees with fp32 in {agreement:.4f} of the rows, below "
                f"min_agreement {min_agreement:g}"
            )
        if cosine is not None and cosine < min_cosine:
            return (
                f"output {name!r} has a mean cosine of {cosine:.4f} to fp32, below min_cosine "
                f"{min_cosine:g}"
            )
    return ""


def _cosines(expected: Array, found: Array) -> Array:
    left = expected.reshape(len(expected), -1)
    right = found.reshape(len(found), -1)
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    # Two rows of zeros are alike.
    alike = np.where((left == right).all(axis=1), 1.0, 0.0)
    safe = np.where(lengths > 0, lengths, 1.0)
    cosines: Array = np.where(lengths > 0, (left * right).sum(axis=1) / safe, alike)
    return cosines


def _same(expected: Array, found: Array) -> Array | None:
    if expected.dtype.kind != "f":
        same = expected == found
    elif expected.ndim < 2 or expected.shape[-1] < 2:
        return None
    else:
        same = expected.argmax(axis=-1) == found.argmax(axis=-1)
    shares: Array = same.reshape(len(expected), -1).mean(axis=1)
    return shares
