"""The largest batches known to fit, by shape and precision, as one process knows them.

What it learns is marked as news, which `shared_ceilings` gives to the other instances.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from workers.batching.ceiling import Ceiling, grown_rows, lowered, may_grow, merged, raised
from workers.batching.shapes import ShapeKey

#: Shapes that are remembered; a model of free shapes must not grow this for ever.
MOST_SHAPES: Final = 256

#: What is known of a shape that always fitted.
_NOTHING: Final[Mapping[str, int]] = MappingProxyType({})

#: A shape and a precision.
Place = tuple[ShapeKey, str]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Shape:
    """What is known of one shape, by precision."""

    ceilings: dict[str, Ceiling] = dataclasses.field(default_factory=dict)
    #: Runs that filled the ceiling and fitted.
    full_runs: dict[str, int] = dataclasses.field(default_factory=dict)
    #: More rows than the ceiling, to be tried by the next batch that has so many.
    tries: dict[str, int] = dataclasses.field(default_factory=dict)

    def rows(self) -> dict[str, int]:
        return {name: ceiling.rows for name, ceiling in self.ceilings.items()} | self.tries


class Ceilings:
    """Rows that fit, learned from what did not."""

    def __init__(self, now_unix_s: Callable[[], float] = time.time) -> None:
        self._now_unix_s = now_unix_s
        self._shapes: dict[ShapeKey, _Shape] = {}
        #: Ceilings that may grow, once others were asked whether they tried it.
        self._ripe: set[Place] = set()
        #: Whether the others do not know yet all that is known here.
        self.has_news = False

    def of(self, sizes: ShapeKey) -> Mapping[str, int]:
        """Return the most rows to run in each precision that has a ceiling."""
        shape = self._shapes.get(sizes)
        if shape is None:
            return _NOTHING
        self._look_at_time(sizes, shape)
        return shape.rows()

    def lowest(self) -> dict[str, int]:
        """Return the lowest ceiling of each precision over all shapes, for people."""
        found: dict[str, int] = {}
        for shape in list(self._shapes.values()):
            for precision, ceiling in shape.ceilings.copy().items():
                found[precision] = min(ceiling.rows, found.get(precision, ceiling.rows))
        return found

    def copy_of(self, sizes: ShapeKey) -> Mapping[str, Ceiling]:
        """Return what is known of a shape, for `restore`."""
        return dict(shape.ceilings) if (shape := self._shapes.get(sizes)) else {}

    def restore(self, sizes: ShapeKey, ceilings: Mapping[str, Ceiling]) -> None:
        """Go back to what `copy_of` returned."""
        if ceilings:
            self._shapes[sizes] = _Shape(ceilings=dict(ceilings))
        else:
            self._shapes.pop(sizes, None)

    def lower(self, sizes: ShapeKey, precision: str, *, failed_rows: int) -> None:
        """Note that ``failed_rows`` were too many."""
        before = self._shapes[sizes].ceilings.get(precision) if sizes in self._shapes else None
        now_unix_s = self._now_unix_s()
        self._put(
            (sizes, precision), lowered(before, failed_rows=failed_rows, now_unix_s=now_unix_s)
        )

    def fitted(self, sizes: ShapeKey, precision: str, rows: int) -> None:
        """Note that a run of ``rows`` fitted, where the precision has a ceiling."""
        shape = self._shapes.get(sizes)
        ceiling = shape.ceilings.get(precision) if shape else None
        if shape is None or ceiling is None or rows < ceiling.rows:
            return
        if rows > ceiling.rows:
            self.found(sizes, precision, rows)
        else:
            shape.full_runs[precision] = shape.full_runs.get(precision, 0) + 1

    def found(self, sizes: ShapeKey, precision: str, rows: int) -> None:
        """Note that so many rows fit, and that it is not known of more."""
        known = self._shapes.get(sizes, _Shape()).ceilings.get(precision)
        self._put((sizes, precision), raised(known, rows=rows, now_unix_s=self._now_unix_s()))

    def everything(self) -> dict[Place, Ceiling]:
        """Return all that is known."""
        return {
            (sizes, precision): ceiling
            for sizes, shape in self._shapes.items()
            for precision, ceiling in shape.ceilings.items()
        }

    def learn(self, others: Mapping[Place, Ceiling]) -> None:
        """Take in what other instances know, then let grow what nobody tried lately."""
        latest = sorted(others.items(), key=lambda other: -other[1].since_unix_s)
        for (sizes, precision), theirs in latest:
            shape = self._shapes.get(sizes)
            if shape is None and len(self._shapes) >= MOST_SHAPES:
                continue
            mine = shape.ceilings.get(precision) if shape else None
            known = merged(mine, theirs) if mine else theirs
            if known != mine:
                self._put((sizes, precision), known)
        ripe, self._ripe, self.has_news = self._ripe, set(), False
        for sizes, precision in ripe:
            if shape := self._shapes.get(sizes):
                self._try_more(shape, precision)

    def _try_more(self, shape: _Shape, precision: str) -> None:
        """Let the next batch be larger, and put off whoever else would try the same."""
        ceiling, now_unix_s = shape.ceilings[precision], self._now_unix_s()
        if may_grow(ceiling, full_runs=shape.full_runs.get(precision, 0), now_unix_s=now_unix_s):
            shape.tries[precision] = grown_rows(ceiling)
            shape.ceilings[precision] = dataclasses.replace(ceiling, since_unix_s=now_unix_s)

    def _look_at_time(self, sizes: ShapeKey, shape: _Shape) -> None:
        now_unix_s = self._now_unix_s()
        for precision, ceiling in shape.ceilings.items():
            full_runs = shape.full_runs.get(precision, 0)
            if precision not in shape.tries and may_grow(
                ceiling, full_runs=full_runs, now_unix_s=now_unix_s
            ):
                self._ripe.add((sizes, precision))
                self.has_news = True

    def _put(self, place: Place, ceiling: Ceiling) -> None:
        """Replace what is known of one place; its runs are counted anew."""
        sizes, precision = place
        shape = self._shapes.setdefault(sizes, _Shape())
        shape.ceilings[precision] = ceiling
        shape.full_runs.pop(precision, None)
        shape.tries.pop(precision, None)
        self.has_news = True
        while len(self._shapes) > MOST_SHAPES:
            del self._shapes[next(iter(self._shapes))]
