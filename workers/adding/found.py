"""What a trial found out about a model, as it goes from the process of the trial to the command."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from workers.adding.speed import Timing, best_batch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One input or output."""

    name: str
    #: numpy's name of it.
    dtype: str
    #: The names of free sizes are the exporter's.
    sizes: tuple[int | str, ...]
    #: ``None``: it belongs to the batch as a whole.
    batch_axis: int | None
    #: The shape of the row that was tried; empty for an output.
    tried: tuple[int, ...] = ()

    @property
    def shape(self) -> str:
        """Return its shape for people, with ``rows`` where rows are counted."""
        return f"[{', '.join(self._called(axis) for axis in range(len(self.sizes)))}]"

    @property
    def free_axes(self) -> tuple[int, ...]:
        """Return the axes of any size that count no rows."""
        free = (axis for axis, size in enumerate(self.sizes) if isinstance(size, str))
        return tuple(axis for axis in free if axis != self.batch_axis)

    def _called(self, axis: int) -> str:
        size = self.sizes[axis]
        if isinstance(size, int):
            return str(size)
        if axis == self.batch_axis:
            return "rows"
        printable = "".join(letter for letter in size if letter.isprintable())
        return printable or "any"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A model that runs, and how."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    precision: str
    #: Whether rows of different jobs may share a run.
    batches: bool
    #: Why they may not; empty when they may.
    why: str
    #: Whether a job runs uncut, because its rows may belong together.
    whole: bool
    timings: tuple[Timing, ...]
    #: Why larger batches were not timed; empty when all were.
    untimed: str
    #: The runtime that was timed.
    runtime: str
    threads: int
    #: The runtime that workers here would choose, where it is another; then the times say little.
    other_runtime: str = ""
    #: Inputs that were tried with larger integers, because zeros and ones said too little.
    wider: tuple[str, ...] = ()
    #: How far answers may differ between batch sizes, as model.toml has it.
    tolerance: float = 1e-3

    @property
    def max_batch_size(self) -> int:
        """Return what model.toml gets: the measured best, or what GPUs like."""
        if not self.batches:
            return 1
        if self.other_runtime:
            return max(timing.rows for timing in self.timings)
        return best_batch(self.timings)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Found:
        ports = {side: tuple(_port(port) for port in values[side]) for side in _SIDES}
        timings = tuple(Timing(**timing) for timing in values["timings"])
        wider = tuple(values["wider"])
        return cls(**{**values, **ports, "timings": timings, "wider": wider})


_SIDES = ("inputs", "outputs")


def _port(values: Mapping[str, Any]) -> Port:
    return Port(**{**values, "sizes": tuple(values["sizes"]), "tried": tuple(values["tried"])})
