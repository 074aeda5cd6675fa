"""Which padded inputs are masks: those whose padding says that other inputs' padding counts not.

Told by runs, since a name says nothing. A mask holds what its padding is not, and nothing else can
be sent in it; so it is not tried with other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from workers.batching.stacking import Array
from workers.probing.difference import difference

Row: TypeAlias = Mapping[str, Array]

#: The answer to a row, padded, with another number in the padding of these inputs; ``None``: it was
#: refused.
Answered: TypeAlias = Callable[[Row, Iterable[str]], Mapping[str, Array] | None]


def masks_among(
    rows: Mapping[str, Iterable[Row]], plain: Row, answered: Answered, *, tolerance: float
) -> frozenset[str]:
    """Return the masks among the padded inputs.

    ``rows``: for each of them rows with other numbers there, and ``plain`` elsewhere.
    """

    def differ(row: Row, first: Iterable[str], second: Iterable[str]) -> bool:
        one, other = answered(row, first), answered(row, second)
        if one is None or other is None:
            return False
        return bool(difference(one, other, tolerance=tolerance))

    hidden = [
        name for name, moved in rows.items() if not any(differ(r, (), (name,)) for r in moved)
    ]
    return frozenset(
        name
        for name in rows
        if name not in hidden and any(differ(plain, (name,), (name, other)) for other in hidden)
    )
