"""How many instances a worker should run: a pure decision with the clock as an argument.

The parent asks once a second (`workers.pool`). It grows by one at a time, counts what still loads
as there, and shrinks only after a quiet time, so that neither a slow load nor a trickle of jobs
makes the number flap.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

#: Instances that are busy for no more than this share of their time have room for a burst.
_ROOMY_LOAD: Final = 0.8

#: Busy for more than this share of the time is busy without a pause, as far as a clock can tell.
_ALL_OF_THE_TIME: Final = 0.95


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The bounds of a worker and what it strives for."""

    min: int
    max: int
    #: What waits should be answered within this time.
    target_drain_s: float = 5.0
    #: Growing one by one, this long apart.
    up_every_s: float = 1.0
    #: Fewer instances must have been enough for this long before the first one is given up.
    down_after_s: float = 60.0
    #: Then one after the other, this long apart.
    down_every_s: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of the fleet at one moment; only this worker's models count."""

    #: Rows that wait, over all priorities and models; those being run are not among them.
    waiting_rows: float
    #: What one busy instance answers; None before the first batch, 0 while that one runs.
    rows_per_s: float | None
    #: The share of their time that this worker's instances were busy since the last look, 0 to 1.
    busy: float
    #: Live workers that serve the same models, this one included: they share what waits.
    workers: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A number of instances, and what the next decision must remember."""

    instances: int
    changed_at_s: float
    #: Since when one instance fewer would have been enough; None while it would not.
    quiet_since_s: float | None = None


def begin(policy: Policy, *, now_s: float) -> Scale:
    """Return the scale of a worker that starts."""
    return Scale(instances=policy.min, changed_at_s=now_s)


def decide(policy: Policy, scale: Scale, seen: Seen | None, *, now_s: float) -> Scale:
    """Return the next scale; ``seen`` None means that nobody could look, and nothing changes."""
    here = scale.instances
    same = dataclasses.replace(scale, quiet_since_s=None)
    if seen is None:
        return same
    if not policy.min <= here <= policy.max:
        return Scale(instances=min(max(here, policy.min), policy.max), changed_at_s=now_s)
    since_s = now_s - scale.changed_at_s
    if here < policy.max and drain_s(seen, instances=here) > policy.target_drain_s:
        more = Scale(instances=here + 1, changed_at_s=now_s)
        return more if since_s >= policy.up_every_s else same
    if here == policy.min or not fewer_suffice(policy, seen, instances=here):
        return same
    quiet_since_s = now_s if scale.quiet_since_s is None else scale.quiet_since_s
    if now_s - quiet_since_s >= policy.down_after_s and since_s >= policy.down_every_s:
        return Scale(instances=here - 1, changed_at_s=now_s, quiet_since_s=quiet_since_s)
    return dataclasses.replace(scale, quiet_since_s=quiet_since_s)


def drain_s(seen: Seen, *, instances: int) -> float:
    """Return how long this worker's share of what waits takes ``instances`` of its own.

    Before anything was measured it is long when all are busy with their first batch, and that one
    takes longer than the time between two looks; else there will be a measure at the next.
    """
    if not seen.rows_per_s:
        return math.inf if seen.waiting_rows and seen.busy > _ALL_OF_THE_TIME else 0.0
    return seen.waiting_rows / seen.workers / (seen.rows_per_s * max(1, instances))


def fewer_suffice(policy: Policy, seen: Seen, *, instances: int) -> bool:
    """Return whether one instance fewer would do, with room to spare: growing must not follow."""
    fewer = instances - 1
    if fewer < 1:
        return seen.waiting_rows == 0 and seen.busy == 0
    load = seen.busy * instances / fewer
    return load < _ROOMY_LOAD and drain_s(seen, instances=fewer) < policy.target_drain_s / 2
