"""Whether two answers to the same row are the same, as far as floating point allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from workers.batching.stacking import Array
from workers.models import ModelSpec

#: How much coarser answers below single precision may be between batch sizes.
_COARSE_FACTOR: Final = 10

#: Answers smaller than this are compared as if they were this large.
_SMALLEST_SCALE: Final = 1e-3


def tolerance_of(spec: ModelSpec, precision: str) -> float:
    return spec.tolerance * (1 if precision == "fp32" else _COARSE_FACTOR)


def difference(alone: Mapping[str, Array], shared: Mapping[str, Array], *, tolerance: float) -> str:
    """Return in words how an answer changed, or nothing when it did not."""
    for name, expected in alone.items():
        found = shared[name]
        if found.shape != expected.shape:
            return f"output {name!r} has shape {list(found.shape)}, not {list(expected.shape)}"
        if expected.dtype.kind != "f":
            if not np.array_equal(found, expected):
                return f"output {name!r} changes"
            continue
        finite = np.abs(expected[np.isfinite(expected)].astype(np.float64))
        scale = max(_SMALLEST_SCALE, float(finite.max(initial=0.0)))
        if not np.allclose(found, expected, rtol=0, atol=tolerance * scale, equal_nan=True):
            return f"output {name!r} changes by more than {tolerance:g} of its largest value"
    return ""


def moved_by(alone: Mapping[str, Array], shared: Mapping[str, Array]) -> float:
    """Return how far an answer moved, as a share of its largest value; 1 where it is another."""
    shares = [0.0]
    for name, expected in alone.items():
        found = shared[name]
        if expected.dtype.kind != "f" or not np.array_equal(
            np.isfinite(expected), np.isfinite(found)
        ):
            shares.append(float(not np.array_equal(expected, found)))
            continue
        numbers = [array[np.isfinite(array)].astype(np.float64) for array in (expected, found)]
        scale = max(_SMALLEST_SCALE, float(np.abs(numbers[0]).max(initial=0.0)))
        shares.append(float(np.abs(numbers[0] - numbers[1]).max(initial=0.0)) / scale)
    return min(1.0, max(shares))


def says_nothing(answer: Mapping[str, Array]) -> bool:
    """Return whether an answer is NaN throughout, so that it is the same whatever it came of."""
    return all(array.dtype.kind == "f" and np.isnan(array).all() for array in answer.values())
