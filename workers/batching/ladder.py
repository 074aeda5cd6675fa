"""What to try next when a batch ran out of memory: a pure decision over the model's ladder."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

_STEP = re.compile(r"([a-z]+[0-9]+)/([0-9]{1,4})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One entry of a ladder: ``fp16/2`` is half the failed batch in FP16."""

    precision: str
    divisor: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """How a batch is run: in which precision, and how many rows at a time."""

    precision: str
    rows: int
    #: Ladder steps that were taken to get here.
    step: int = 0


def parse_step(text: str) -> Step:
    """Return the step that ``fp16/2`` writes; ``ValueError`` says what a step looks like."""
    found = _STEP.fullmatch(text)
    if found is None or int(found[2]) < 1:
        raise ValueError(f"steps look like 'fp16/2' (half the batch in fp16), not {text!r}.")
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
            rung = Rung(precision=step.precision, rows=fewer, step=taken + 1)
    return dataclasses.replace(rung, rows=1)


def after_out_of_memory(steps: Sequence[Step], failed: Rung) -> Rung | None:
    """Return the next rung after ``failed``; ``None`` when one row did not fit on the last."""
    for taken in range(failed.step, len(steps)):
        step = steps[taken]
        rows = max(1, failed.rows // step.divisor)
        # One row in the same precision cannot get smaller: that would be the same run again.
        if (step.precision, rows) != (failed.precision, failed.rows):
            return Rung(precision=step.precision, rows=rows, step=taken + 1)
    if failed.rows == 1:
        return None
    return Rung(precision=failed.precision, rows=failed.rows // 2, step=len(steps))
