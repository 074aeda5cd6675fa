"""Keeps the books while a storm goes on, and judges at its end."""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable
from typing import Final

from tests.chaos import invariants
from tests.chaos.account import Account, Doom
from tests.chaos.fleet import Fleet, quiet
from tests.chaos.processes import marked
from tests.chaos.table import Report, Round, round_of
from tests.chaos.witness import Witness, read_results, stored_results
from tests.support.waiting import wait_until

_ORPHANS_EVERY_S: Final = 1.0
#: Whatever must come comes within this time.
_PATIENCE_S: Final = 90.0


class Judge:
    """Knows what happened to every job, and says what must not have."""

    def __init__(self, fleet: Fleet, account: Account, witness: Witness, report: Report) -> None:
        self._fleet, self._account, self._witness = fleet, account, witness
        self._report = report
        self._dooms: list[tuple[Doom, Round]] = []
        self._instances: dict[int, int] = fleet.parents_of_instances()
        self._orphans_at_s = 0.0
        #: Whether something was waited for that never came: nothing after it means much.
        self.in_vain = False

    # -- meanwhile

    def look(self) -> None:
        """Read the books, and what dead clients left unread."""
        self._account.update()
        if time.monotonic() < self._orphans_at_s:
            return
        self._orphans_at_s = time.monotonic() + _ORPHANS_EVERY_S
        if orphans := self._account.orphans():
            with self._fleet.server.client() as client:
                for job_id, text in read_results(client, orphans).items():
                    self._account.answered(job_id, text)

    def wait(self, true: Callable[[], bool], *, what: str, every_s: float = 0.02) -> None:
        """Wait until ``true`` is, reading the books; what never comes is a broken invariant."""

        def look() -> bool:
            self.look()
            return true()

        try:
            wait_until(look, what=what, timeout_s=_PATIENCE_S, every_s=every_s)
        except AssertionError as error:
            self.broken(str(error))
            self.in_vain = True

    def doom(self, dooms: list[Doom], each: Round) -> None:
        """Note the instances that a fault ended."""
        self._dooms += [(doom, each) for doom in dooms]

    def check(self, where: str) -> None:
        """See what can be seen while the fleet works and is whole."""
        told = ((job_id, times) for job_id, times in self._witness.told.copy().items() if times > 1)
        for job_id, times in told:
            self.broken(f"{job_id} was answered {times} times", where)
        with self._fleet.server.client() as client:
            for line in invariants.dead_letters(client):
                self.broken(line, where)
        for line in invariants.strange_processes(self._fleet):
            self.broken(line, where)
        self._check_instances(where)

    def _check_instances(self, where: str) -> None:
        """Nothing but a fault may end an instance, or the parent that it had."""
        now = self._fleet.parents_of_instances()
        doomed = {doom.pid for doom, _ in self._dooms}
        for pid in self._instances.keys() - now.keys() - doomed:
            if self._instances[pid] not in self._fleet.expected:
                self.broken(f"the instance {pid} ended by itself, or by its parent", where)
        self._instances = now

    def broken(self, line: str, where: str = "") -> None:
        """Say that an invariant does not hold."""
        if line not in self._report.broken:
            self._report.broken.append(line)
            print(f"BROKEN {where}{': ' if where else ''}{line}", flush=True)

    # -- at the end

    def judge(self, *, patient: bool) -> None:
        """Wait for the last job, look at everything, end the fleet, look at what is left of it.

        ``patient``: wait until the consumers of dead processes are forgotten, too.
        """
        self.wait(self._ended, what="the last job", every_s=0.2)
        self.check("at the end")
        with self._fleet.server.client() as client:
            stored, fenced = stored_results(client)
        verdicts = invariants.verdicts(
            self._account,
            told=self._witness.told,
            stored=stored,
            fenced=fenced,
            dooms=[doom for doom, _ in self._dooms],
        )
        for line in verdicts.lines():
            self.broken(line)
        self._count(verdicts)
        self._judge_server(patient=patient)
        self._judge_end()

    def _ended(self) -> bool:
        with self._fleet.server.client() as client:
            return quiet(client) and not self._account.missing()

    def _judge_server(self, *, patient: bool) -> None:
        parents = [worker.pid for worker in self._fleet.workers]
        with self._fleet.server.client() as client:
            if patient:
                self.wait(
                    lambda: not list(invariants.strange_consumers(client, parents)),
                    what="consumers of living processes alone",
                    every_s=1,
                )
            for line in invariants.left_in_redis(client):
                self.broken(line)

    def _judge_end(self) -> None:
        statuses = self._fleet.stop()
        if any(statuses):
            self.broken(f"the workers ended with {statuses} at the end")
        for process in marked(self._fleet.mark):
            self.broken(f"left behind: {process.pid} ({process.name})")

    def _count(self, verdicts: invariants.Verdicts) -> None:
        account, report = self._account, self._report
        report.accepted = len(account.accepted)
        report.troubles = dict(sorted(account.troubles.items()))
        counts = collections.Counter(len(starts) for starts in account.starts.values())
        report.starts = dict(sorted(counts.items()))
        for job_id in verdicts.lost:
            round_of(report.rounds, account.accepted[job_id]).lost += 1
        for job_id in verdicts.doubled:
            round_of(report.rounds, account.accepted.get(job_id, 0)).doubled += 1
        again = [starts for starts in account.starts.values() if len(starts) > 1]
        for start, following in itertools.chain.from_iterable(map(itertools.pairwise, again)):
            for doom, each in self._dooms:
                if doom.covers(start) and following.at_unix_s > doom.at_unix_s:
                    each.again_s.append(following.at_unix_s - doom.at_unix_s)
