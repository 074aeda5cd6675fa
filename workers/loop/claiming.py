"""What an instance asks for: as much of each queue as it may run next, and how long ago each had
its turn; and how it waits, at the doorbell when nothing is there, or for more where a model wants
that.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import redis

from producer.contract.names import queue_of
from workers.batching.closing import Closed, Limits, why_closed
from workers.delivery.ledger import NEVER_S, Claimed, Entry, Ledger, Wish
from workers.loading import Loading
from workers.orders import Orders
from workers.status import Status

#: Given-back entries ring no doorbell: this bounds how long one lies unseen by an idle instance.
DOORBELL_S: Final = 0.5

#: How long a wait may last before the loop shows that it lives.
TICK_S: Final = 0.25

#: The next batch is claimed so long before the running one should end, or earlier where it takes
#: long to read: what comes until then need not wait for it.
_AHEAD_BY_S: Final = 0.05

#: Where a claim takes many runs, it holds as many rows as are answered in this time: with fewer, a
#: claim costs more than its runs, or its jobs of one shape are few; more would be kept from other
#: instances, and hold up other models.
_MANY_RUNS_S: Final = 0.1
#: And no more full batches than this.
_MANY_BATCHES: Final = 16


class Claiming:
    """The claims of one consumer; the claim loop sends them."""

    def __init__(
        self,
        *,
        client: redis.Redis,
        ledger: Ledger,
        loading: Loading,
        status: Status,
        orders: Orders,
    ) -> None:
        self._client, self._ledger, self._loading = client, ledger, loading
        self._status, self._orders = status, orders
        #: Seconds that a batch, and a row, of each model take, smoothed.
        self._batch_s: dict[str, float] = {}
        self._row_s: dict[str, float] = {}
        #: How many runs a claim of each model takes where full ones would take one, smoothed.
        self._spread: dict[str, float] = {}
        #: Seconds that it takes to claim and read a batch, smoothed.
        self._read_s: float | None = None
        #: When the last batch of each model ended. Monotonic clock.
        self._turn_ended_s: dict[str, float] = {}
        #: How long we waited for work since this was set to 0.
        self.idle_s = 0.0

    def wishes(self, *, running: str | None = None) -> list[Wish]:
        """Return what a claim may take; ``running`` is the model whose turn it is meanwhile.

        Whoever had its turn longest ago comes first: the script looks at fewer of the others.
        """
        now_s = time.monotonic()
        wishes = [self._wish(model, running, now_s) for model in self._loading.runners]
        return sorted(wishes, key=lambda wish: -wish.since_turn_s)

    def turn_ends(self, model: str) -> None:
        """Note that a batch of ``model`` ended: it waits anew."""
        self._turn_ended_s[model] = time.monotonic()

    def learn(self, model: str, *, took_s: float, rows: int, runs: int) -> None:
        """Take in how long a batch took, and how many runs."""
        full = math.ceil(rows / self._loading.runners[model].max_rows)
        self._batch_s[model] = _smooth(self._batch_s.get(model), took_s)
        self._row_s[model] = _smooth(self._row_s.get(model), took_s / rows)
        self._spread[model] = _smooth(self._spread.get(model), runs / full)

    def expects_end_within(self, model: str, limit_s: float) -> bool:
        """Return whether a batch of ``model`` should end so soon; nobody knows of the first."""
        return model in self._batch_s and self._batch_s[model] < limit_s

    def learn_read(self, took_s: float) -> None:
        """Take in how long it took to claim and read a batch."""
        self._read_s = _smooth(self._read_s, took_s)

    def claims_ahead_in_s(self, model: str) -> float:
        """Return how long after a batch of ``model`` has begun the next one is to be claimed.

        Hooks run beside the engine, and have as much time as there is.
        """
        hooks = (runner.hooks for runner in self._loading.runners.values())
        if self._read_s is None or any(each and each.has_preprocess for each in hooks):
            return 0.0
        return claim_ahead_in_s(batch_s=self._batch_s[model], read_s=self._read_s)

    def at_doorbell(self) -> tuple[Claimed, Sequence[Entry]] | None:
        """Wait for a new entry; returns it, and what came with it of other queues.

        Some servers answer with one entry of each stream: those of other models are to be given
        back, and wait for their turn.
        """
        queues = [queue_of(model) for model in self._loading.runners]
        entries = self._wait(queues, DOORBELL_S)
        if not entries:
            return None
        queue = next(q for q in queues if entries[0].stream in self._ledger.keys.streams(q))
        mine, others = self._parted(queue, entries)
        return Claimed(queue=queue, closed=Closed.EMPTY, entries=tuple(mine)), others

    def gather(
        self, claimed: Claimed, model: str, meanwhile: Callable[[], None]
    ) -> tuple[Claimed, Sequence[Entry]]:
        """Wait for more jobs, as long as the model asks for, by default not at all, and no longer
        than until a job of another model comes; returns what came of others, to be given back.

        ``meanwhile`` is called again and again.
        """
        if claimed.closed is not Closed.EMPTY:
            return claimed, ()
        runner = self._loading.runners[model]
        spec, began_s = runner.spec, time.monotonic()
        limits = Limits(
            max_rows=runner.max_rows,
            max_bytes=spec.max_batch_bytes,
            max_queue_delay_s=spec.max_queue_delay_s,
        )
        entries = list(claimed.entries)
        while True:
            rows = sum(entry.rows for entry in entries)
            nbytes = sum(entry.nbytes for entry in entries)
            age_s = time.monotonic() - began_s
            closed = why_closed(
                limits, rows=rows, nbytes=nbytes, waiting=0, oldest_age_s=age_s, alone=False
            )
            if closed is None and self._orders.draining.is_set():
                closed = Closed.DELAY
            if closed is not None:
                return dataclasses.replace(claimed, closed=closed, entries=tuple(entries)), ()
            self._status.tick()
            meanwhile()
            rest_s = min(spec.max_queue_delay_s - age_s, TICK_S)
            came = self._wait([queue_of(model) for model in self._loading.runners], rest_s)
            mine, others = self._parted(claimed.queue, came)
            entries += mine
            if others:
                return dataclasses.replace(claimed, entries=tuple(entries)), others

    def _parted(self, queue: str, entries: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Return the entries of ``queue``, and all others."""
        streams = self._ledger.keys.streams(queue)
        mine = [entry for entry in entries if entry.stream in streams]
        return mine, [entry for entry in entries if entry.stream not in streams]

    def _wait(self, queues: Sequence[str], wait_s: float) -> list[Entry]:
        began_s = time.monotonic()
        try:
            return self._ledger.doorbell(self._client, queues, wait_s)
        finally:
            self.idle_s += time.monotonic() - began_s

    def _wish(self, model: str, running: str | None, now_s: float) -> Wish:
        runner = self._loading.runners[model]
        rows = rows_to_claim(
            max_rows=runner.max_rows,
            max_batch_size=runner.spec.max_batch_size,
            row_s=self._row_s.get(model),
            spread=self._spread.get(model, 1.0),
        )
        return Wish(
            queue=queue_of(model),
            max_rows=rows,
            max_bytes=runner.spec.max_batch_bytes,
            max_entries=rows,
            since_turn_s=0.0 if model == running else self._since_turn_s(model, now_s),
        )

    def _since_turn_s(self, model: str, now_s: float) -> float:
        ended_s = self._turn_ended_s.get(model)
        return NEVER_S if ended_s is None else now_s - ended_s


def rows_to_claim(*, max_rows: int, max_batch_size: int, row_s: float | None, spread: float) -> int:
    """Return how many rows a claim may hold: as many as one run takes, or more where claims take
    many runs all the same. ``row_s``: how long a row takes, None before the first; ``spread``: how
    many runs a claim took where full ones would have taken one.
    """
    row_by_row = max_rows == 1
    if row_s is None or not (row_by_row or spread > 2):
        return max_rows
    most = max_batch_size if row_by_row else _MANY_BATCHES * max_rows
    return max(max_rows, min(most, int(_MANY_RUNS_S / row_s)))


def claim_ahead_in_s(*, batch_s: float, read_s: float) -> float:
    """Return how long after the begin of a batch the next one is claimed, so that it is read when
    that has taken ``batch_s``; ``read_s``: how long it takes to claim and read one.
    """
    return max(0.0, batch_s - max(_AHEAD_BY_S, 3 * read_s))


def _smooth(before: float | None, now: float) -> float:
    return now if before is None else 0.7 * before + 0.3 * now
