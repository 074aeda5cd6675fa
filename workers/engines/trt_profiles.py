"""Which profile of a plan a batch takes, and to what it is padded there. Pure arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanProfile:
    """One profile as the plan has it."""

    index: int
    #: The least and the largest shape of each input.
    ranges: Mapping[str, tuple[Shape, Shape]]
    #: The axis of each input that counts rows.
    axes: Mapping[str, int | None]
    #: Memory for what is computed in between.
    scratch_bytes: int

    @property
    def largest(self) -> dict[str, Shape]:
        """Return the largest shape of each input."""
        return {name: largest for name, (_least, largest) in self.ranges.items()}

    @property
    def rows(self) -> int:
        """Return the rows that it takes at most."""
        return max(
            (
                largest[axis]
                for name, largest in self.largest.items()
                if (axis := self.axes[name]) is not None
            ),
            default=1,
        )

    @property
    def text(self) -> str:
        """Return its shapes in words."""
        return ", ".join(
            f"{name} {list(least)} to {list(largest)}"
            for name, (least, largest) in self.ranges.items()
        )

    def takes(self, shapes: Mapping[str, Shape]) -> bool:
        """Return whether a batch of ``shapes`` fits, padded or as it is."""
        return all(
            self._takes_input(least, largest, shapes[name], self.axes[name])
            for name, (least, largest) in self.ranges.items()
        )

    def padded(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the shapes that a batch runs with: more rows where it has fewer than it must."""
        return {
            name: tuple(
                max(size, low) if axis == self.axes[name] else size
                for axis, (size, low) in enumerate(zip(shapes[name], least, strict=True))
            )
            for name, (least, _largest) in self.ranges.items()
        }

    @staticmethod
    def _takes_input(least: Shape, largest: Shape, shape: Shape, rows: int | None) -> bool:
        return len(shape) == len(largest) and all(
            size <= high and (size >= low or axis == rows)
            for axis, (low, size, high) in enumerate(zip(least, shape, largest, strict=True))
        )

    def elements(self) -> int:
        """Return how many numbers its largest batch holds."""
        return sum(math.prod(shape) for shape in self.largest.values())


def tightest(profiles: Sequence[PlanProfile], shapes: Mapping[str, Shape]) -> PlanProfile | None:
    """Return the smallest profile that takes a batch of ``shapes``."""
    fitting = [profile for profile in profiles if profile.takes(shapes)]
    return min(fitting, key=PlanProfile.elements, default=None)
