"""How the workers of one host share its instances: pure decisions, made by each for itself.

Every worker sees the same list of workers in the same order, so their shares add up without a word
between them. What a worker really holds is for its leases to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Sharer:
    """A live worker of this host, in the order in which they share: the oldest first.

    A new one is the last, so that it moves nobody's instances more than it must.
    """

    since_unix_s: float
    #: What its leases are signed with; no other worker has the same.
    token: str
    #: Keys of the instances that it may use.
    may_use: frozenset[str] = dataclasses.field(compare=False)


def shares(instances: int, workers: int) -> list[int]:
    """Return how many of ``instances`` each of ``workers`` may hold: equal parts, and the rest one
    each for the first.
    """
    part, rest = divmod(instances, workers)
    return [part + (place < rest) for place in range(workers)]


def share_of(own: Sharer, present: Collection[Sharer]) -> int:
    """Return how many instances ``own`` may hold beside all that are ``present``.

    Who may use none of our instances does not count: it has others.
    """
    rivals = sorted({own, *(each for each in present if own.may_use & each.may_use)})
    return shares(len(own.may_use), len(rivals))[rivals.index(own)]


def least_wanted_first(own: Sharer, present: Collection[Sharer], keys: Sequence[str]) -> list[str]:
    """Return ``keys`` from the one that fewest others may use to the one that most may.

    We take from the front and give back from the end: what only we may use would lie idle.
    """
    others = [each for each in present if each != own]
    return sorted(keys, key=lambda key: sum(key in each.may_use for each in others))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a worker does next about what it holds."""

    #: To be drained, and given back when its process is gone.
    give_back: str | None = None
    #: Were to be given back, and may be kept after all.
    keep: tuple[str, ...] = ()
    #: Whose processes are gone: free for others from now on.
    release: tuple[str, ...] = ()
    #: How many more are wanted.
    take: int = 0


def next_step(
    target: int, *, running: Sequence[str], returning: Sequence[str], gone: Collection[str]
) -> Step:
    """Return the step from what is held towards ``target`` instances.

    ``running`` may have a process, ``returning`` have been told to drain; of these, ``gone`` have
    none any more. A surplus is given back one at a time, so that work goes on beside it.
    """
    ended = [key for key in returning if key in gone]
    lack = max(0, target - len(running))
    keep, release = ended[:lack], ended[lack:]
    on_their_way = [key for key in returning if key not in gone]
    surplus = len(running) - target
    return Step(
        give_back=running[-1] if surplus > 0 and not on_their_way else None,
        keep=tuple(keep),
        release=tuple(release),
        take=max(0, lack - len(keep) - len(on_their_way)),
    )
