"""The parent's side of delivery: renew, release, take over, move what is due and what stock apps
put into lists, lease instances, publish the status.

One thread with a Redis connection of its own, because Celery's loop stands still while it
reconnects and does not run while the worker shuts down.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import redis

from producer.contract.names import Keys
from workers.delivery import ledger as delivery
from workers.delivery.bridge import Bridge
from workers.delivery.ledger import Ledger, Note
from workers.delivery.scripts import Call, read_script, send
from workers.instances import leasing as leases
from workers.instances.leasing import Leasing
from workers.parent.deaths import Cause, Death
from workers.parent.hold_off import HoldOff
from workers.parent.holders import holders, is_dead
from workers.serving import MODEL_LIFE_S, Serving
from workers.telemetry.logs import said

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.25
_STATUS_EVERY_S: Final = 2.0
_STATUS_LIFE_S: Final = 15
_MOVE_DUE_EVERY_S: Final = 1.0
_SIGN_ON: Final = read_script(Path(__file__).parent, "sign_on")
#: How often the lists of stock apps are looked into while Redis is in trouble; else at every tick.
_MOVE_LISTS_EVERY_S: Final = 1.0
#: A consumer that holds nothing and was silent so long belongs to no living process.
_CONSUMER_SILENT_S: Final = 60.0

#: What the journal is told of the jobs of an instance that ended.
_NOTES: Final = {Cause.OURS: Note.FORGIVE, Cause.TIMEOUT: Note.TIMEOUT}


class Keeper(threading.Thread):
    """Keeps what the instances hold, for as long as they live, and frees it when they die."""

    def __init__(
        self,
        *,
        client: redis.Redis,
        keys: Keys,
        node: str,
        serving: Serving,
        claim_ttl_s: float,
        consumers: Callable[[], list[str]],
        status: Callable[[], Mapping[str, Any]],
        leasing: Leasing,
    ) -> None:
        super().__init__(name="keeper", daemon=True)
        self._client, self._keys, self._node = client, keys, node
        self._serving = serving
        self._claim_ttl_s, self._consumers, self._status = claim_ttl_s, consumers, status
        self._leasing = leasing
        self._bridge = Bridge(client=client, keys=keys)
        self._deaths: queue.SimpleQueue[Death] = queue.SimpleQueue()
        self._unreleased: list[Death] = []
        self._stopping = threading.Event()
        #: There is something to do before the next tick. A signal's handler may come in while
        #: another call is put here.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        now_s = time.monotonic()
        self._hold_off = HoldOff.begin(ttl_s=claim_ttl_s, now_s=now_s)
        self._every_s = {
            self._renew: claim_ttl_s / 3,
            self._lease: _TICK_S,
            self._publish: _STATUS_EVERY_S,
            self._move_due: _MOVE_DUE_EVERY_S,
            self._move_lists: _MOVE_LISTS_EVERY_S,
            self._take_over: min(claim_ttl_s / 3, 2.0),
            self._find_dead: min(claim_ttl_s / 3, 2.0),
        }
        self._due_at_s = dict.fromkeys(self._every_s, now_s)

    def prepare(self) -> None:
        """Create the groups, lease instances and name the models, before the first one starts.

        Raises what Redis says of the groups and of the leases.
        """
        self._ensure_groups()
        self._leasing.turn()
        self._guard(self._publish)

    def died(self, death: Death) -> None:
        """Free what a dead instance held; called from the watcher, too."""
        self._deaths.put(death)
        self._wakes.put(None)

    def changed(self) -> None:
        """Publish the status now: an instance started, ended or is in another state."""
        self._due_at_s[self._publish] = time.monotonic()
        self._wakes.put(None)

    def stop(self, timeout_s: float) -> None:
        """Do what is left and end, at the latest after ``timeout_s``."""
        self._stopping.set()
        self._wakes.put(None)
        if self.is_alive():
            self.join(timeout_s)

    def run(self) -> None:
        while not self._stopping.is_set():
            self._turn(time.monotonic())
            until_due_s = min(self._due_at_s.values()) - time.monotonic()
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=max(0.0, min(_TICK_S, until_due_s)))
        self._guard(self._release_dead)
        self._guard(self._leasing.leave)
        self._guard(self._sign_off)

    def _turn(self, now_s: float) -> None:
        self._guard(self._release_dead)
        if self._leasing.is_due:
            self._due_at_s[self._lease] = now_s
        for work, at_s in self._due_at_s.items():
            if at_s <= now_s:
                # Jitter keeps the scans of many workers apart.
                self._due_at_s[work] = now_s + self._every_s[work] * random.uniform(0.9, 1.0)
                self._guard(work)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except redis.RedisError as error:
            # Whatever is refused, claims of the dead must be freed all the same, or nothing would
            # ever empty a full server. Only a renewal that did not come through counts.
            unreachable = isinstance(error, redis.ConnectionError | redis.TimeoutError)
            if work == self._renew or unreachable:
                self._hold_off.failed(now_s=time.monotonic())
            if work == self._renew and unreachable:
                # The first renewal after an outage begins the time in which others have theirs.
                self._due_at_s[self._renew] = time.monotonic() + _TICK_S
            name = work.__name__.strip("_")
            logger.warning("keeper.trouble", extra={"work": name, "error": said(error)})
            if "NOGROUP" in str(error):
                self._guard(self._ensure_groups)
        except Exception:
            logger.exception("keeper.failed")

    def _ensure_groups(self) -> None:
        send(self._client, delivery.ensure_groups(self._keys, self._serving.held_queues))

    def _renew(self) -> None:
        queues = self._serving.held_queues
        send(self._client, delivery.renew(self._keys, queues, self._consumers()))
        self._hold_off.renewed(now_s=time.monotonic())

    def _lease(self) -> None:
        before = leases.status(self._leasing)
        self._leasing.turn()
        if leases.status(self._leasing) != before:
            self.changed()
        self._due_at_s[self._lease] = time.monotonic() + self._leasing.again_in_s

    def _release_dead(self) -> None:
        while not self._deaths.empty():
            self._unreleased.append(self._deaths.get())
        while self._unreleased:
            queues = self._serving.held_queues
            death = self._unreleased[0]
            ledger = Ledger(
                keys=self._keys, consumer=death.consumer, result_ttl_s=0, max_attempts=0
            )
            note = _NOTES.get(death.cause)
            entry = death.alone if note is Note.TIMEOUT else ""
            notes = [ledger.unfinished(name, note, entry=entry) for name in queues if note]
            release = ledger.release(queues, remove=True, unread=death.cause is Cause.OURS)
            *_, released = send(self._client, *notes, release)
            self._unreleased.pop(0)
            if released:
                logger.info(
                    "claims.released", extra={"consumer": death.consumer, "count": released}
                )

    def _take_over(self) -> None:
        seconds, microseconds = self._client.time()
        server_unix_s, now_s = seconds + microseconds / 1e6, time.monotonic()
        self._hold_off.heard(server_unix_s=server_unix_s, now_s=now_s)
        if not self._hold_off.allows(now_s=now_s):
            until_s = self._hold_off.until_s
            self._due_at_s[self._take_over] = min(until_s, self._due_at_s[self._take_over])
            return
        # It is allowed now, not whenever a server that stood still reads it.
        call = delivery.take_over(
            self._keys,
            self._serving.held_queues,
            claim_ttl_s=self._claim_ttl_s,
            silent_s=_CONSUMER_SILENT_S,
            until_unix_s=server_unix_s + self._claim_ttl_s / 3,
        )
        (taken,) = send(self._client, call)
        if taken:
            logger.warning("claims.taken_over", extra={"count": taken})

    def _find_dead(self) -> None:
        """Release for those that are dead with their parents, where the kernel can say so."""
        found = holders(self._client, self._keys, self._serving.held_queues)
        for name in filter(is_dead, found):
            self.died(Death(consumer=name, cause=Cause.DIED))

    def _move_due(self) -> None:
        now_unix_s = time.time()
        calls = [
            delivery.move_due(self._keys, name, now_unix_s=now_unix_s)
            for name in self._serving.queues
        ]
        send(self._client, *calls)

    def _move_lists(self) -> None:
        """Move a bounded part of what stock apps sent: what else is due comes between the parts."""
        more = self._bridge.move(self._serving.queues)
        self._due_at_s[self._move_lists] = time.monotonic() + (0.0 if more else _TICK_S)

    def _publish(self) -> None:
        now_unix_s = time.time()
        call = Call(
            script=_SIGN_ON,
            keys=[self._keys.worker(self._node), self._keys.workers, self._keys.models],
            args=[
                *(self._node, json.dumps(self._status()), _STATUS_LIFE_S),
                *(now_unix_s, now_unix_s + MODEL_LIFE_S, *self._serving.models),
            ],
            read=int,
        )
        send(self._client, call)

    def _sign_off(self) -> None:
        pipe = self._client.pipeline(transaction=False)
        pipe.delete(self._keys.worker(self._node))
        pipe.zrem(self._keys.workers, self._node)
        pipe.execute()
