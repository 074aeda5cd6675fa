"""The instance processes of one worker: one for each slot, watched, and replaced when one ends.

A slot is the place of one instance that this worker may use; a process is started in it only while
its instance is leased to this worker. Knows no Celery and no Redis. The watcher thread hears the
instances, kills what is hung, hands every death to `on_death` and fills empty slots, also while
Celery waits for a broker that is away. `on_change` hears of every start, end and new state.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from producer.contract.counters import add_counters
from producer.contract.settings import SOCKET_TIMEOUT_S
from workers.hello import Lease
from workers.instances import clock
from workers.instances.instance import Instance
from workers.loading import retry_gap_s
from workers.orders import terminate_line
from workers.parent import process
from workers.parent.code_on_disk import CodeOnDisk
from workers.parent.deaths import Death, death_of, how_it_ended
from workers.parent.process import InstanceProcess
from workers.parent.slots import Slot, first_models, report
from workers.serving import Serving

logger = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 0.25

#: How long a loop may be in conversation with a server that stands still: what it sends through
#: Celery is tried three times.
_LONGEST_TALK_S: Final = 3 * SOCKET_TIMEOUT_S

_CHANGED: Final = "this worker's code has changed on disk since it was started: restart the worker"

#: A turn of the watcher that took longer says that this process stood still.
_OWN_PAUSE_S: Final = 2.0


class Processes:
    """Starts, watches and ends the instances of one worker."""

    def __init__(
        self,
        *,
        node: str,
        serving: Serving,
        instances: Sequence[Instance],
        lease_of: Callable[[Instance, float], Lease],
        threads: int,
        silent_limit_s: float,
        log_level: str,
        on_death: Callable[[Death], None],
        on_change: Callable[[], None],
    ) -> None:
        self._node, self._serving, self._threads = node, serving, threads
        self._silent_limit_s = silent_limit_s
        self._log_level, self._on_death, self._on_change = log_level, on_death, on_change
        self._lease_of = lease_of
        self._code = CodeOnDisk()
        self._slots = [
            Slot(number=number, instance=instance) for number, instance in enumerate(instances)
        ]
        self._wanted = len(instances)
        #: The models that some process of this worker has loaded.
        self._loadable: frozenset[str] = frozenset()
        # Reentrant: a signal handler of the main thread may come in while the main thread holds
        # it.
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._draining = False
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def start(self) -> None:
        """Start every instance, then the watcher."""
        self._start_missing()
        self._watcher.start()

    def _start_missing(self) -> None:
        """Start a process in every empty slot that is leased and whose time has come."""
        now_s = time.monotonic()
        with self._lock:
            for slot in self._slots:
                if slot.process is not None or slot.retry_at_s > now_s or self._draining:
                    continue
                if slot.leased_until_s > clock.now_s():
                    self._try_to_start(slot)
                    self._drain_late(slot)

    def _try_to_start(self, slot: Slot) -> None:
        """Start a process, or try again later."""
        if self._code.speaks_otherwise:
            self._cannot_start(slot, _CHANGED)
            return
        try:
            self._start(slot)
        except OSError as error:
            # The machine lacks memory, processes or descriptors.
            self._cannot_start(slot, str(error.strerror))

    def _cannot_start(self, slot: Slot, why: str) -> None:
        slot.refusals += 1
        gap_s = retry_gap_s(slot.refusals)
        slot.retry_at_s = time.monotonic() + gap_s
        slot.text = f"no process can be started: {why}; tried {slot.refusals} times"
        extra = {"slot": slot.number, "reason": why, "retry_in_s": gap_s}
        logger.error("instance.cannot_start", extra=extra)
        self._on_change()

    def _start(self, slot: Slot) -> None:
        slot.starts, slot.refusals = slot.starts + 1, 0
        slot.process = process.start(
            node=self._node,
            slot=slot.number,
            number=slot.starts,
            models=first_models(slot, self._slots, self._serving.models, self._loadable),
            lease=self._lease_of(slot.instance, slot.leased_until_s),
            environ=slot.instance.environ(threads=self._threads),
            log_level=self._log_level,
        )
        self._selector.register(slot.process.report_fd, selectors.EVENT_READ, slot)
        logger.info("instance.started", extra={"slot": slot.number, "pid": slot.process.pid})
        self._on_change()

    def _tell_models(self) -> None:
        """Tell the instances what is served now: at once what is no more, and one after the other
        what is new, so that the others serve while one loads. A load that ends its process ends no
        second one.
        """
        models = self._serving.models
        with self._lock:
            running = [each for each in self.alive() if not each.told_to_drain]
            for each in running:
                each.serve_none_but(models)
            if any(slot.is_failing for slot in self._slots):
                return
            behind = [each for each in running if set(each.models) != set(models)]
            if behind and all(each.is_settled for each in running):
                behind[0].serve(models)

    def _drain_late(self, slot: Slot) -> None:
        """Drain a process that was being started when the signal to end came."""
        if self._draining and slot.process is not None:
            slot.process.drain()

    def want(self, count: int) -> int:
        """Run ``count`` instances, as far as there are slots and leases; returns how many to want.

        Which ones is for the leases to say (`workers.instances.leasing`).
        """
        with self._lock:
            before, self._wanted = self._wanted, max(0, min(count, len(self._slots)))
        if before != self._wanted:
            self._on_change()
        return self._wanted

    def lease(self, number: int, *, until_s: float) -> None:
        """Let a process be started in the slot until then, by `workers.instances.clock`."""
        with self._lock:
            slot = self._slots[number]
            slot.leased_until_s, slot.lost = until_s, ""

    def give_back(self, number: int) -> None:
        """Let the process of the slot finish what it runs and end; none is started."""
        with self._lock:
            slot = self._slots[number]
            slot.leased_until_s = 0.0
            if slot.process is not None and not slot.process.told_to_drain:
                slot.process.drain()

    def end(self, number: int, why: str) -> None:
        """End the process of the slot at once, for it may not use its instance any more."""
        with self._lock:
            slot = self._slots[number]
            slot.leased_until_s = 0.0
            if slot.process is not None:
                slot.process.kill(by_us=True, because=why)

    def lose(self, number: int, why: str) -> None:
        """End the process of the slot at once and say that its device is gone."""
        with self._lock:
            self._slots[number].lost = why
            self.end(number, why)

    def is_empty(self, number: int) -> bool:
        """Whether no process is in the slot."""
        with self._lock:
            return self._slots[number].process is None

    def terminate(self, marks: Sequence[str]) -> None:
        """Have the instances end what they run of the jobs that ``marks`` cancel."""
        for running in self.alive():
            for mark in marks:
                running.tell(terminate_line(mark))

    def drain(self) -> None:
        """Let every instance finish what it runs and end; none is started after this."""
        self._draining = True
        for running in self.alive():
            running.drain()

    def kill(self) -> None:
        """End every instance at once; their jobs go back, uncounted."""
        self._draining = True
        for running in self.alive():
            running.kill(by_us=True)

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until no instance is left; False when ``timeout_s`` was not enough."""
        deadline_s = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.02)
        return True

    # -- what others may ask

    def alive(self) -> list[InstanceProcess]:
        """Return the instances whose end was not seen yet."""
        with self._lock:
            return [slot.process for slot in self._slots if slot.process is not None]

    @property
    def wanted(self) -> int:
        """How many instances should run."""
        return self._wanted

    def report(self) -> list[dict[str, Any]]:
        """Return what is known of every slot in use, or used before, fit for JSON."""
        with self._lock:
            return [
                report(slot)
                for slot in self._slots
                if slot.starts or slot.leased_until_s or slot.lost
            ]

    # -- the watcher

    def _watch(self) -> None:
        turned_s = time.monotonic()
        while True:
            try:
                turned_s = self._watch_once(turned_s)
            except Exception:
                # The instances die with this thread, and nobody else would start new ones.
                logger.exception("watcher.failed")
                time.sleep(_LOOK_EVERY_S)

    def _watch_once(self, turned_s: float) -> float:
        """Hear, find, fill and kill; returns when, in monotonic time. ``turned_s``: the last."""
        for key, _ in self._selector.select(_LOOK_EVERY_S):
            self._hear(key.data)
        self._find_dead()
        self._start_missing()
        self._tell_models()
        now_s = time.monotonic()
        if now_s - turned_s > _OWN_PAUSE_S:
            # We stood still ourselves (a frozen container, Ctrl-Z): what instances said
            # meanwhile lies unread, and their silence is no evidence.
            self._hear_anew(now_s)
        else:
            self._kill_hung(now_s)
        return now_s

    def _hear(self, slot: Slot) -> None:
        with self._lock:
            if slot.process is None:
                return
            before = slot.process.state
            alive = slot.process.read()
            self._loadable |= slot.process.loaded
            if not alive:
                self._take_out(slot)
            elif slot.process.state != before:
                self._on_change()

    def _find_dead(self) -> None:
        """See a death that the pipe does not show: something the instance started holds it open."""
        with self._lock:
            for slot in self._slots:
                if slot.process is not None and slot.process.popen.poll() is not None:
                    self._take_out(slot)

    def _take_out(self, slot: Slot) -> None:
        with self._lock:
            heard = slot.process
            assert heard is not None
            self._selector.unregister(heard.report_fd)
            heard.kill(by_us=False)
            status = heard.close()
            # Before anybody can see that it is gone: who waits for that ends what frees its claims.
            self._on_death(death_of(heard))
            slot.process = None
            self._bury(slot, heard, status)
        self._on_change()

    def _bury(self, slot: Slot, dead: InstanceProcess, status: int) -> None:
        """Keep the totals of ``dead`` and decide when its slot is filled again."""
        for model, counters in dead.said.get("counters", {}).items():
            slot.counters[model] = add_counters(slot.counters.get(model, {}), counters)
        slot.loads += int(dead.said.get("loads", 0))
        how = dead.killed_because or how_it_ended(status)
        if dead.was_ready or dead.ended_by_us:
            slot.failures, slot.retry_at_s, slot.text = 0, 0.0, ""
        else:
            slot.failures += 1
            gap_s = retry_gap_s(slot.failures)
            slot.retry_at_s = time.monotonic() + gap_s
            if self._code.has_changed:
                how += f" ({_CHANGED})"
            slot.text = f"{how} while its models were loaded; tried {slot.failures} times"
        if self._draining:
            return
        extra = {"slot": slot.number, "pid": dead.pid, "how": how}
        if dead.told_to_drain and status == 0:
            logger.info("instance.ended", extra=extra)
        else:
            logger.warning("instance.died", extra=extra)

    def _hear_anew(self, now_s: float) -> None:
        for running in self.alive():
            running.said_at_s = now_s

    def _kill_hung(self, now_s: float) -> None:
        for running in self.alive():
            because = why_hung(
                running.said,
                age_s=now_s - (running.said_at_s or running.began_s),
                silent_limit_s=self._silent_limit_s,
                still_limit_s=self._silent_limit_s + _LONGEST_TALK_S,
            )
            if because:
                running.kill(by_us=False, because=because)
            elif because := why_too_long(running.said):
                running.timed_out = True
                # As said with the time: another batch may have begun since, which is not to blame.
                running.timed_out_alone = str(running.said.get("alone", ""))
                running.kill(by_us=False, because=because)


def why_too_long(said: Mapping[str, Any]) -> str:
    """Return why an instance must be killed for the batch that it runs, or nothing."""
    limit_s = said.get("batch_limit_s", 0.0)
    if not said or said["batch_s"] <= limit_s:
        return ""
    return f"its batch of {said['batch_model']} ran for more than {limit_s:g} s"


def why_hung(
    said: Mapping[str, Any], *, age_s: float, silent_limit_s: float, still_limit_s: float
) -> str:
    """Return why an instance must be killed, or nothing.

    ``age_s`` is how long ago it ``said`` this; its reports need no server, its loop does. A load
    may take as long as it likes, as long as the process reports.
    """
    if said and age_s > silent_limit_s:
        return f"it reported nothing for {age_s:.0f} s"
    if said.get("state") in (None, "starting", "loading"):
        return ""
    if said["silent_s"] > still_limit_s:
        return f"its loop stood still for {said['silent_s']:.0f} s"
    return ""


def pids(processes: Iterable[InstanceProcess]) -> list[int]:
    """Return the process ids, in the order of their slots."""
    return [running.pid for running in processes]
