"""The largest batches known to fit, by shape and precision, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from workers.batching.shapes import ShapeKey

#: Shapes that are remembered; a model of free shapes must not grow this for ever.
_MOST_SHAPES: Final = 256


class Ceilings:
    """Rows that fit, learned from what did not. 0: not even one row fits in that precision."""

    def __init__(self) -> None:
        self._rows: dict[ShapeKey, dict[str, int]] = {}

    def of(self, sizes: ShapeKey) -> Mapping[str, int]:
        """Return the ceiling of each precision that has one, as a copy."""
        return dict(self._rows.get(sizes, {}))

    def lower(self, sizes: ShapeKey, precision: str, *, failed_rows: int) -> None:
        """Note that ``failed_rows`` were too many; half of them are expected to fit."""
        known = self._rows.setdefault(sizes, {})
        known[precision] = min(failed_rows // 2, known.get(precision, failed_rows))
        while len(self._rows) > _MOST_SHAPES:
            del self._rows[next(iter(self._rows))]

    def restore(self, sizes: ShapeKey, rows: Mapping[str, int]) -> None:
        """Go back to ``rows``, as ``of`` returned them."""
        self._rows[sizes] = dict(rows)
        if not rows:
            del self._rows[sizes]
