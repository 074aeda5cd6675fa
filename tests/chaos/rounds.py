"""A number of faults, one after the other, each under many unfinished jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from tests.chaos import invariants
from tests.chaos.faults import Fault
from tests.chaos.table import Report, Round
from tests.chaos.trial import Trial

#: No fault strikes with fewer jobs unfinished.
UNFINISHED: Final = 200
#: Some end between the look and the fault.
_MARGIN: Final = 60

#: Jobs that did not come to wait within this time are followed by as many again.
_SEND_AGAIN_S: Final = 6.0

#: So often a fault strikes while claims of the one before are still to be taken over.
_OVERTAKEN: Final = 0.2


class Rounds:
    """Sends jobs, strikes, and waits until the fleet is whole, round after round."""

    def __init__(self, trial: Trial, faults: Sequence[Fault], *, jobs_a_round: int) -> None:
        self._trial, self._faults, self._jobs_a_round = trial, faults, jobs_a_round
        self._fleet, self._account, self._judge = trial.fleet, trial.account, trial.judge

    def run(self, tell: Callable[[str], object]) -> Report:
        """Let all faults strike, judge, and return what was measured."""
        for number, fault in enumerate(self._faults, 1):
            each = self._round(number, fault)
            tell(self._line(each))
            if self._judge.in_vain:
                break
        wanted = self._jobs_a_round * len(self._faults)
        if (missing := wanted - len(self._account.accepted)) > 0:
            self._fleet.send(missing)
            self._judge.wait(lambda: len(self._account.accepted) >= wanted, what="the last jobs")
        return self._trial.end()

    def _round(self, number: int, fault: Fault) -> Round:
        self._judge.look()
        first = self._fleet.send(self._missing(number))
        self._await_moment()
        each = self._trial.strike(fault, first)
        where = f"round {number}"
        if each.unfinished < UNFINISHED:
            self._judge.broken(f"only {each.unfinished} jobs unfinished", where)
        self._judge.check(where)
        each.overtaken = self._trial.chance.random() < _OVERTAKEN
        if not each.overtaken:
            self._judge.wait(self._no_claim_of_the_dead, what="no claim of a dead process")
        self._judge.wait(lambda: self._fleet.unfinished() < UNFINISHED, what="most jobs to end")
        return each

    def _missing(self, number: int) -> int:
        """Return how many jobs to send: what the rounds before did not get accepted, too."""
        wanted = self._jobs_a_round * number - len(self._account.accepted)
        return max(wanted, UNFINISHED + 2 * _MARGIN)

    def _await_moment(self) -> None:
        """Wait until enough jobs are unfinished: while they are sent, or some are answered."""
        chance, enough = self._trial.chance, UNFINISHED + _MARGIN
        rising = chance.randint(enough, max(enough, int(self._jobs_a_round * 0.6)))
        send_again_at_s = time.monotonic() + _SEND_AGAIN_S

        def enough_wait() -> bool:
            nonlocal send_again_at_s
            if time.monotonic() > send_again_at_s:
                # They were answered as fast as they came: what else runs here slows their senders.
                self._fleet.send(self._jobs_a_round)
                send_again_at_s += _SEND_AGAIN_S
            return self._fleet.unfinished() >= rising

        self._judge.wait(enough_wait, what=f"{rising} unfinished jobs")
        until_s = time.monotonic() + chance.choice((0.0, chance.uniform(0, 1)))
        while time.monotonic() < until_s and self._fleet.unfinished() > enough:
            time.sleep(0.01)

    def _no_claim_of_the_dead(self) -> bool:
        parents = [worker.pid for worker in self._fleet.workers]
        with self._fleet.server.client() as client:
            return not invariants.claims_of_the_dead(client, parents)

    def _line(self, each: Round) -> str:
        return (
            f"{each.number:4}/{len(self._faults)}  {each.fault:26} {each.unfinished:5} unfinished"
            f"  whole after {each.recovery_s:5.1f} s  {len(self._account.accepted):7} accepted"
            f"  {self._trial.minutes:5.1f} min  {each.which}"
        ).rstrip()
