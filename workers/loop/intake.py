"""What this process takes in and gives back: batches are claimed, read and begun, and whatever is
said to Redis goes with what waits to be ended.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

import redis

from producer.contract.names import model_of
from workers.delivery.ledger import (
    FREE_READS,
    Claimed,
    Entry,
    Ledger,
    Note,
    ensure_groups,
)
from workers.delivery.scripts import Call, send
from workers.loading import Loading
from workers.loop.batches import Batch, Begun, InHand, read_claim, sort_begun
from workers.loop.claiming import DOORBELL_S, Claiming
from workers.loop.endings import Endings
from workers.loop.hooked import start_preprocess
from workers.loop.large_arrays import LargeArrays
from workers.loop.underway import Underway
from workers.orders import Orders
from workers.status import Status
from workers.telemetry.events import TaskEvents


class Intake:
    """The batches of one consumer until they run; the claim loop says when."""

    def __init__(
        self,
        *,
        client: redis.Redis,
        ledger: Ledger,
        arrays: LargeArrays,
        underway: Underway,
        loading: Loading,
        claiming: Claiming,
        endings: Endings,
        events: TaskEvents,
        status: Status,
        orders: Orders,
    ) -> None:
        self._client, self._ledger, self._arrays = client, ledger, arrays
        self._underway, self._loading, self._claiming = underway, loading, claiming
        self._endings, self._events = endings, events
        self._status, self._orders = status, orders

    def exchange(self, *calls: Call[Any]) -> list[Any]:
        """End what waits to be ended and make ``calls``, in one round trip; returns the calls'
        answers.
        """
        ends = self._endings.calls()
        if not ends and not calls:
            return []
        answers = send(self._client, *ends, *calls)
        self._endings.settle(answers[: len(ends)])
        return answers[len(ends) :]

    def claim(self) -> InHand | None:
        """Take what waits; with nothing there, wait at the doorbell."""
        wishes = self._claiming.wishes()
        if not wishes:
            self.exchange()
            self._events.flush()
            self._orders.draining.wait(DOORBELL_S)
            return None
        others: Sequence[Entry] = ()
        (claimed,) = self.exchange(self._ledger.claim(wishes))
        if claimed is None:
            self._events.flush()
            rung = self._claiming.at_doorbell()
            if rung is None:
                return None
            claimed, others = rung
        if not others:
            model, meanwhile = model_of(claimed.queue), self._events.flush_when_due
            claimed, others = self._claiming.gather(claimed, model, meanwhile)
        if others:
            self.exchange(self._release(self._queues, keep=claimed.entries))
        return InHand(batch=self._read(claimed))

    def begin(self, batch: Batch) -> Begun:
        """Count the starts; give back and bury what must not run here now."""
        jobs = [(job.entry, job.job_id, job.stamps) for job in batch.jobs]
        asked_s = time.monotonic()
        (verdicts,) = self.exchange(self._ledger.begin(batch.queue, jobs))
        begun = sort_begun(
            batch,
            verdicts,
            worker=self._endings.worker,
            asked_s=asked_s,
            now_unix_s=time.time(),
        )
        begun = begun.without(self._endings.end_stored(batch.queue, begun.suspects))
        self._arrays.remove([job.entry for job in begun.dropped])
        calls: list[Call[Any]] = [self._endings.bury(batch.queue, *each) for each in begun.buried]
        if begun.later:
            buried = (job for job, _ in begun.buried)
            kept = [job.entry for job in (*begun.started, *buried)]
            calls.append(self._release([batch.queue], keep=kept))
        if calls:
            self.exchange(*calls)
        for job in begun.started:
            self._events.received(job)
        for job in begun.runs:
            self._events.started(job)
        return begun

    def claim_ahead(self, running: str) -> InHand | None:
        """Claim and read the next batch while one of the model ``running`` is on its way; with
        hooks it is begun, and `preprocess` runs.
        """
        began_s = time.monotonic()
        wishes = self._claiming.wishes(running=running)
        (claimed,) = self.exchange(self._ledger.claim(wishes, running=True))
        if claimed is None:
            return None
        since_s = time.monotonic()
        hand = InHand(batch=self._read(claimed), since_s=since_s)
        self._claiming.learn_read(time.monotonic() - began_s)
        runner = self._loading.runners[hand.batch.model]
        # A job whose earlier start has no outcome, or whose readers died, waits for its turn.
        if not (runner.hooks and runner.hooks.has_preprocess) or hand.is_alone:
            return hand
        begun = self.begin(hand.batch)
        going = [] if begun.alone else start_preprocess(runner, begun.runs)
        return dataclasses.replace(hand, begun=begun, going=going)

    def give_back(self, hand: InHand) -> None:
        """Give back a batch that waits, uncounted."""
        hand.drop()
        forgive = [
            self._ledger.unfinished(hand.batch.queue, Note.FORGIVE, entry=job.entry.place)
            for job in hand.started
        ]
        self.exchange(*forgive, self._release(self._queues))

    def resync(self) -> None:
        """Give back what Redis counts as ours and this process does not know; nothing runs.

        The reply of a claim or of a begin can be lost with the connection. Such a start never
        happened, so it is taken back; what has ended here is ended there first.
        """
        self.exchange(ensure_groups(self._ledger.keys, self._queues))
        self.exchange(*self._all_forgiven(), self._release(self._queues))

    def close(self) -> None:
        """Give back everything, uncounted: what waits, what runs, and what Redis alone knows of."""
        release = self._ledger.release(self._queues, remove=True)
        self.exchange(*self._all_forgiven(), release)

    @property
    def _queues(self) -> list[str]:
        """The queues that jobs of ours can be in."""
        return self._orders.serving.held_queues

    def _read(self, claimed: Claimed) -> Batch:
        """Decode a claim; bury at once what nobody can read."""
        batch = read_claim(
            claimed,
            self._loading.runners[model_of(claimed.queue)],
            blobs=self._arrays.read(claimed.entries),
            max_reads=FREE_READS + self._ledger.max_attempts,
            tick=self._status.tick,
        )
        if batch.unreadable:
            bad = [self._endings.bury_unreadable(batch.queue, entry) for entry in batch.unreadable]
            self.exchange(*bad)
        return batch

    def _release(self, queues: Sequence[str], *, keep: Iterable[Entry] = ()) -> Call[int]:
        """Give back all but ``keep``, what runs, and what is answered and waits to be ended."""
        ours = (*self._underway.entries, *self._endings.entries)
        return self._ledger.release(queues, keep=[*keep, *ours])

    def _all_forgiven(self) -> list[Call[int]]:
        """Return what takes back every start of ours that has no outcome."""
        return [self._ledger.unfinished(queue, Note.FORGIVE) for queue in self._queues]
