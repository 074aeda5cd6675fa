"""What to try next when a batch ran out of memory: a pure decision over the model's ladder."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Final

#: In a step: the precision that ran out of memory.
SAME: Final = "same"

_STEP = re.compile(rf"([a-z]+[0-9]+|{SAME})/([0-9]{{1,4}})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One entry of a ladder: ``fp16/2`` is half the failed batch in FP16, ``same/2`` half of it in
    the precision that failed.
    """

    precision: str
    divisor: int

    def after(self, failed: str) -> str:
        """Return the precision of the step, taken when ``failed`` ran out of memory."""
        return failed if self.precision == SAME else self.precision


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """How a batch is run: in which precision, and how many rows at a time."""

    precision: str
    rows: int
    #: Ladder steps that were taken to get here.
    step: int = 0
    #: Whether the rows were answered before, in a lower precision and not with finite numbers.
    again: bool = False


def parse_step(text: str) -> Step:
    """Return the step that ``fp16/2`` writes; ``ValueError`` says what a step looks like."""
    found = _STEP.fullmatch(text)
    if found is None or int(found[2]) < 1:
        raise ValueError(
            "steps look like 'fp16/2' (half the batch in fp16) or 'same/2' (half of it in the "
            f"precision that failed), not {text!r}."
        )
    return Step(precision=found[1], divisor=int(found[2]))


def first_rung(
    steps: Sequence[Step], *, precision: str, rows: int, ceilings: Mapping[str, int]
) -> Rung:
    """Return where a batch of ``rows`` starts, given what is known to be too much.

    A ceiling of 0 says that not even one row fits in that precision. When no precision has
    room, the last rung is tried with one row all the same: it ends in an error for one job.
    """
    rung = Rung(precision=precision, rows=rows)
    for taken, step in enumerate((*steps, None)):
        fits = min(rung.rows, ceilings.get(rung.precision, rung.rows))
        if fits > 0:
            return dataclasses.replace(rung, rows=fits)
        if step is not None:
            fewer = max(1, rung.rows // step.divisor)
            rung = Rung(precision=step.after(rung.precision), rows=fewer, step=taken + 1)
    return dataclasses.replace(rung, rows=1)


def after_out_of_memory(steps: Sequence[Step], failed: Rung) -> Rung | None:
    """Return the next rung after ``failed``; ``None`` when one row did not fit on the last."""
    for taken in range(failed.step, len(steps)):
        step = steps[taken]
        precision, rows = step.after(failed.precision), max(1, failed.rows // step.divisor)
        # One row in the same precision cannot get smaller: that would be the same run again.
        if (precision, rows) != (failed.precision, failed.rows):
            return Rung(precision=precision, rows=rows, step=taken + 1)
    if failed.rows == 1:
        return None
    return Rung(precision=failed.precision, rows=failed.rows // 2, step=len(steps))


def within(rung: Rung, ceilings: Mapping[str, int]) -> Rung:
    """Return ``rung`` with no more rows than are known to fit in its precision, at least one."""
    return dataclasses.replace(
        rung, rows=max(1, min(rung.rows, ceilings.get(rung.precision, rung.rows)))
    )
