"""The largest batch that fits, found at load by running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from producer.contract.errors import OutOfMemory
from workers.batching.pieces import Piece
from workers.batching.stacking import Array, stack
from workers.engines.resident import ResidentEngines


def largest(fits: Callable[[int], bool], *, limit: int) -> int:
    """Return the most rows up to ``limit`` that fit, by halving the gap; one is known to."""
    if fits(limit):
        return limit
    known, too_many = 1, limit
    while too_many - known > 1:
        middle = (known + too_many) // 2
        if fits(middle):
            known = middle
        else:
            too_many = middle
    return known


def find_ceilings(
    engines: ResidentEngines,
    row: Mapping[str, Array],
    batch_axes: Mapping[str, int | None],
    limit: int,
) -> Iterator[tuple[str, int]]:
    """Yield each precision with the most copies of ``row`` that one run of it takes."""
    for precision in engines:

        def fits(rows: int, precision: str = precision) -> bool:
            copies = [Piece(job=0, start=0, stop=1)] * rows
            dtypes = {tensor.name: tensor.dtype for tensor in engines[precision].inputs}
            try:
                feeds = stack([row], copies, batch_axes)
                engines.run(
                    precision,
                    {name: feed.astype(dtypes[name], copy=False) for name, feed in feeds.items()},
                )
            except (OutOfMemory, MemoryError):
                return False
            return True

        yield precision, largest(fits, limit=limit)
