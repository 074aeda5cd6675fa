"""How the workers of one host share its instances: pure decisions, made by each for itself.

Every worker sees the same list of workers in the same order, so their shares add up without a word
between them. What a worker really holds is for its leases to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence


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


def dealt_to(own: Sharer, present: Collection[Sharer]) -> frozenset[str]:
    """Return the instances that are ``own``'s part beside all that are ``present``.

    They are dealt as cards are: each worker in turn gets one, until nobody can get another. Where
    all may use the same this is an equal part for each, and the rest one each for the first; where
    they may not, what only some may use lies idle for nobody's sake.
    """
    everyone = sorted({own, *present})
    may_use = {each.token: sorted(each.may_use) for each in everyone}
    free = set[str]().union(*(each.may_use for each in everyone))
    owners: dict[str, str] = {}
    in_turn = list(may_use)
    while in_turn and free:
        in_turn = [token for token in in_turn if _deal(token, may_use, owners, free, set())]
    return frozenset(key for key, token in owners.items() if token == own.token)


def _deal(
    token: str,
    may_use: Mapping[str, Sequence[str]],
    owners: dict[str, str],
    free: set[str],
    asked: set[str],
) -> bool:
    """Give one instance more to a worker; who has what it could use is given another for it.

    ``asked`` are the workers that are being given one. Returns whether there was one to be had;
    when not, there will never be.
    """
    asked.add(token)
    for key in may_use[token]:
        if key in free:
            free.remove(key)
            owners[key] = token
            return True
    for key in may_use[token]:
        if owners[key] not in asked and _deal(owners[key], may_use, owners, free, asked):
            owners[key] = token
            return True
    return False


def own_part_first(part: Collection[str], keys: Sequence[str]) -> list[str]:
    """Return ``keys`` with those of the own part before those that are others'.

    We take from the front and give back from the end.
    """
    return sorted(keys, key=lambda key: key not in part)


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
