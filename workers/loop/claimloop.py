"""The claim loop of one instance: claim, begin, run, complete, with one batch decoded ahead.

Reading order: `ClaimLoop.serve`, then the steps of a batch: `Intake.claim`, `Intake.begin`, `_run`,
and `Intake.exchange`, which ends the batch before in the same round trip as the next step. Round
trips for each batch: one when another batch was ready behind it, two when work waited, three when
the instance was idle; one more where replies were made while the next batch ran.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, NoReturn

import redis
from kombu.exceptions import OperationalError

from workers.delivery.ledger import Ledger
from workers.loading import Loading
from workers.loop.batches import InHand
from workers.loop.claiming import TICK_S, Claiming
from workers.loop.endings import Endings
from workers.loop.hooked import all_of, start_preprocess
from workers.loop.intake import Intake
from workers.loop.large_arrays import LargeArrays
from workers.loop.underway import Running, Underway
from workers.orders import Orders
from workers.status import State, Status
from workers.telemetry.events import TaskEvents
from workers.telemetry.logs import said

logger = logging.getLogger(__name__)

#: A batch is decoded ahead only behind one that should end within this time, and is given back
#: after it, so that a free instance gets it instead; one whose hooks still run stays.
_AHEAD_S: Final = 0.5

#: What Redis, or Celery's way to it, raises when it cannot do what it is asked.
_TROUBLE: Final = (redis.RedisError, OperationalError)

#: The longest gap between two tries after Redis failed.
_LONGEST_BACKOFF_S: Final = 1.0


class ClaimLoop:
    """Runs batches of the loaded models until it is told to drain."""

    def __init__(
        self,
        *,
        client: redis.Redis,
        ledger: Ledger,
        loading: Loading,
        claiming: Claiming,
        endings: Endings,
        events: TaskEvents,
        status: Status,
        orders: Orders,
        arrays: LargeArrays,
    ) -> None:
        self._loading, self._claiming = loading, claiming
        self._endings, self._events = endings, events
        self._status, self._orders = status, orders
        self._underway = Underway(
            ledger=ledger,
            loading=loading,
            claiming=claiming,
            endings=endings,
            status=status,
            orders=orders,
        )
        self._intake = Intake(
            client=client,
            ledger=ledger,
            arrays=arrays,
            underway=self._underway,
            loading=loading,
            claiming=claiming,
            endings=endings,
            events=events,
            status=status,
            orders=orders,
        )
        self._ahead: InHand | None = None
        #: Batches that were dropped while hooks of them ran.
        self._dropped: list[InHand] = []
        #: Whether Redis may count entries as ours that this process knows nothing of.
        self._unsure = True
        #: Not before are answers that Redis did not take sent again beside a run. Monotonic clock.
        self._again_at_s = 0.0

    def serve(self) -> None:
        """Run batches until draining; then end what ran and give back the rest."""
        backoff_s = 0.0
        while not self._orders.draining.is_set():
            self._status.tick()
            try:
                self._cycle()
                backoff_s = 0.0
            except _TROUBLE as error:
                backoff_s = min(_LONGEST_BACKOFF_S, 2 * backoff_s or 0.05)
                self._recover(error, backoff_s)
        self._status.become(State.DRAINING)
        self._finish()
        self._hand_back()
        self._underway.close()

    # -- the steps of a batch

    def _cycle(self) -> None:
        if self._underway.end_terminated():
            self._end_process()
        if self._unsure:
            self._resync()
        self._follow()
        if self._unsure:
            # While replies were waited for: nothing is claimed before it is known what is ours.
            return
        began_s, self._claiming.idle_s = time.monotonic(), 0.0
        hand, self._ahead = self._ahead or self._intake.claim(), None
        if hand is None:
            return
        if self._orders.draining.is_set() or not self._serves(hand):
            # What was claimed meanwhile is given back, when the loop ends or at the next turn.
            self._ahead = hand
            return
        begun = hand.begun or self._intake.begin(hand.batch)
        self._endings.add_answers(hand.batch.queue, begun.answered)
        if begun.runs:
            self._run(self._underway.begin(hand, begun))
        self._make_room()
        model = hand.batch.model
        self._claiming.turn_ends(model)
        self._underway.forget_orders(self._ahead)
        busy_s = time.monotonic() - began_s - self._claiming.idle_s
        self._status.counters[model].busy_s += busy_s

    def _follow(self) -> None:
        """Serve what the parent wants served; engines are loaded and freed between two batches."""
        if self._goes_on():
            return
        self._finish()
        if self._unsure or (self._ahead is not None and self._serves(self._ahead)):
            return
        if self._ahead is not None:
            self._give_back_ahead()
        if not self._must_change():
            return
        self._intake.exchange()
        self._events.flush()
        models = self._orders.serving.models
        if self._loading.is_behind(models):
            self._loading.follow(models)
        self._loading.load(self._loading.due())

    def _goes_on(self) -> bool:
        """Whether the next batch may run though replies of the one before are still made."""
        ahead = self._ahead
        held_up = self._unsure or self._orders.draining.is_set()
        return not held_up and ahead is not None and self._serves(ahead) and not ahead.is_alone

    def _serves(self, hand: InHand) -> bool:
        return hand.batch.model in self._orders.serving.models

    def _must_change(self) -> bool:
        """Return whether a model is to be loaded or freed as soon as nothing runs."""
        behind = self._loading.is_behind(self._orders.serving.models)
        return behind or bool(self._loading.due())

    def _run(self, run: Running) -> None:
        """Run the engine; beside it end what needs none, and decode the next batch."""
        model = run.batch.model
        if run.runner.hooks:
            self._preprocess(run)
        engine = self._underway.start(run)
        self._events.flush_when_due()
        self._beside(lambda: self._claim_ahead(run, engine))
        self._wait(engine)
        self._underway.engine_ended(run, engine.result())
        if run.ended is not None and self._ahead is None and self._claims_beside(run):
            # What has come since then need not wait for the replies.
            self._beside(lambda: self._take_ahead(model))
        self._loading.share_ceilings(model)

    def _preprocess(self, run: Running) -> None:
        """Wait for the hooks before the engine."""
        run.going = run.going or start_preprocess(run.runner, run.jobs)
        if not all(each.done() for each in run.going):
            # The batch before is answered, and waits for no hook of this one.
            self._beside(self._intake.exchange)
            self._wait(all_of(run.going))
        self._underway.prepared(run)

    # -- waiting

    def _wait(self, future: Future[Any], limit_s: float = math.inf) -> bool:
        """Wait for the engine or for hooks, and do meanwhile what cannot wait; returns whether it
        took no longer than ``limit_s``.
        """
        until_s = time.monotonic() + limit_s
        while not self._has_ended(future, until_s - time.monotonic()):
            if time.monotonic() >= until_s:
                return False
        return True

    def _finish(self) -> None:
        """Wait for the replies of all that has left the engine."""
        while behind := self._underway.behind:
            self._has_ended(behind[0])

    def _make_room(self) -> None:
        """Wait until the engine may run again: beside one batch whose replies are made, if the next
        one is ready.
        """
        while len(behind := self._underway.behind) > int(self._goes_on()):
            self._has_ended(behind[0])

    def _has_ended(self, future: Future[Any], limit_s: float = math.inf) -> bool:
        """Wait a moment for ``future``, and answer meanwhile what is ready to be."""
        waited_for = {future, *self._underway.behind}
        wait_s = max(0.0, min(TICK_S, limit_s))
        ended = concurrent.futures.wait(waited_for, wait_s, concurrent.futures.FIRST_COMPLETED).done
        if self._underway.collect() and not self._underway.empty:
            # Answers travel with the next step, and wait for no run.
            self._beside(self._intake.exchange)
        if ended:
            return future in ended
        self._status.tick()
        self._events.flush_when_due()
        if self._unsure and not self._endings.empty and time.monotonic() >= self._again_at_s:
            # The step with which they travelled failed, and the next one may be far.
            self._beside(self._intake.exchange)
        if self._ahead is not None and self._has_waited(self._ahead):
            self._beside(self._give_back_ahead)
        if self._underway.end_terminated():
            self._end_process()
        return False

    # -- beside a running batch

    def _beside(self, work: Callable[[], object]) -> None:
        """Do ``work`` while the engine runs; what fails then is mended before the next claim."""
        try:
            work()
        except _TROUBLE as error:
            self._unsure = True
            self._again_at_s = time.monotonic() + _LONGEST_BACKOFF_S
            self._drop_ahead()
            _trouble(error)

    def _claims_beside(self, run: Running) -> bool:
        """Whether another batch may be claimed while ``run`` is on its way."""
        soon = self._claiming.expects_end_within(run.batch.model, _AHEAD_S)
        held_up = self._unsure or self._orders.draining.is_set()
        return soon and not (run.begun.alone or held_up or self._must_change())

    def _claim_ahead(self, run: Running, engine: Future[Any]) -> None:
        """Claim the next batch shortly before the engine should be free."""
        if not self._claims_beside(run):
            # What was answered without a run waits for nobody.
            self._intake.exchange()
            return
        if (wait_s := self._claiming.claims_ahead_in_s(run.batch.model)) > 0:
            self._intake.exchange()
            if self._wait(engine, wait_s) or not self._claims_beside(run):
                return
        self._take_ahead(run.batch.model)

    def _take_ahead(self, running: str) -> None:
        self._ahead = self._intake.claim_ahead(running)

    def _give_back_ahead(self) -> None:
        """Give back the batch ahead, uncounted."""
        hand, self._ahead = self._ahead, None
        if hand is not None:
            self._intake.give_back(hand)

    def _has_waited(self, hand: InHand) -> bool:
        return time.monotonic() - hand.since_s > _AHEAD_S and not hand.is_worked_on

    def _drop_ahead(self) -> None:
        hand, self._ahead = self._ahead, None
        if hand is not None:
            hand.drop()
            if hand.is_worked_on:
                self._dropped.append(hand)

    def _end_process(self) -> NoReturn:
        """End this process and what runs in it, uncounted: nothing else ends an engine's run.

        A job with batch-mates runs to its end, and what it answers is dropped.
        """
        self._hand_back()
        self._status.on_change()
        os._exit(0)

    # -- trouble, and the end

    def _recover(self, error: Exception, backoff_s: float) -> None:
        _trouble(error)
        self._unsure = True
        if isinstance(error, redis.ConnectionError | redis.TimeoutError):
            # A flush would wait as long again for a server that has fallen silent.
            self._events.reconnect()
        self._orders.draining.wait(backoff_s)

    def _resync(self) -> None:
        """Let Redis and this process know the same; what runs is waited for, and ended first."""
        self._finish()
        self._drop_ahead()
        self._leave_hooks()
        self._intake.resync()
        self._unsure = False

    def _leave_hooks(self) -> None:
        """Wait for the hooks of what was dropped: they have the threads that the next jobs need.

        One that never returns is over the time limit of its own job here, not of one behind it.
        Answers do not wait for that, nor does the end of this process.
        """
        if self._dropped:
            self._intake.exchange()
        while self._dropped:
            hand = self._dropped.pop()
            assert hand.begun is not None
            lap = self._underway.time(hand.batch, hand.begun)
            ended = all_of(hand.going)
            while not (self._orders.draining.is_set() or self._wait(ended, TICK_S)):
                continue
            self._status.batch_ends(lap)

    def _hand_back(self) -> None:
        """End what ran, give back the rest; tried until it is done or the parent's patience is
        over.

        With nothing in hand there is nothing to insist on.
        """
        insist = not (self._ahead is None and self._endings.empty and self._underway.empty)
        while True:
            self._status.tick()
            try:
                self._intake.exchange()
                if self._endings.empty:
                    self._intake.close()
                    break
            except _TROUBLE as error:
                _trouble(error)
                if not insist:
                    break
            time.sleep(TICK_S)
        self._events.flush()


def _trouble(error: Exception) -> None:
    logger.warning("redis.trouble", extra={"error": said(error)})
