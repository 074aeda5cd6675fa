"""How many rows one run may hold: in rows, in bytes and in elements."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from workers.batching.shapes import ShapeKey


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """What bounds a run of one model; one row always runs."""

    max_rows: int
    #: Of all inputs together, padding included.
    max_bytes: int
    #: Of the largest input, padding included; ``None``: any number.
    max_elements: int | None

    def rows(self, key: ShapeKey) -> int:
        """Return how many rows of that shape one run may hold."""
        fits = [self.max_rows]
        if nbytes := row_bytes(key):
            fits.append(self.max_bytes // nbytes)
        if self.max_elements is not None and (elements := row_elements(key)):
            fits.append(self.max_elements // elements)
        return max(1, min(fits))


def row_elements(key: ShapeKey) -> int:
    """Return the elements of one row of the largest input that has rows."""
    return max((math.prod(tensor.shape) for tensor in key if not tensor.value), default=0)


def row_bytes(key: ShapeKey) -> int:
    """Return the bytes of one row of all inputs that have rows."""
    return sum(
        math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize
        for tensor in key
        if not tensor.value
    )
