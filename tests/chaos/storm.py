"""A storm of seeded faults over a fleet that works: ``python -m tests.chaos.storm --rounds 200``.

In each round clients send jobs, one fault strikes while at least 200 of them are unfinished, and
the fleet becomes whole again. At the end every job is judged.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.chaos import faults, invariants
from tests.chaos.account import Account
from tests.chaos.faults import Fault
from tests.chaos.fleet import Fleet, Shape, quiet, running_fleet
from tests.chaos.invariants import Doom
from tests.chaos.processes import marked
from tests.chaos.recovery import Probes
from tests.chaos.table import Report, Round, markdown, round_of
from tests.chaos.witness import Witness, read_results, stored_results
from tests.support.waiting import wait_until

#: No fault strikes with fewer jobs unfinished.
UNFINISHED: Final = 200
#: Some end between the look and the fault.
_MARGIN: Final = 60

#: So often a fault strikes while claims of the one before are still to be taken over.
_OVERTAKEN: Final = 0.2

_ORPHANS_EVERY_S: Final = 1.0
_CONSUMERS_GONE_S: Final = 90.0
_LAST_JOB_S: Final = 180.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a storm is to do."""

    rounds: int
    seed: int
    jobs_a_round: int = 1000
    kinds: tuple[Fault, ...] = faults.KILLS
    shape: Shape = dataclasses.field(default_factory=Shape)


class Storm:
    """One storm over one fleet."""

    def __init__(self, plan: Plan, fleet: Fleet, account: Account, witness: Witness) -> None:
        self._plan, self._fleet, self._account, self._witness = plan, fleet, account, witness
        self._chance = random.Random(plan.seed)
        self._dooms: list[Doom] = []
        self._orphans_at_s = 0.0
        self._began_s = time.monotonic()
        with fleet.server.client() as client:
            info: Any = client.info("server")
        name = "Valkey" if "valkey_version" in info else "Redis"
        version = info.get("valkey_version", info["redis_version"])
        self.report = Report(seed=plan.seed, server=f"{name} {version}")

    def run(self, tell: Callable[[str], object]) -> Report:
        """Let all faults strike, judge, and return what was measured."""
        with Probes(self._fleet, self._account) as probes:
            kinds = faults.drawn(self._plan.kinds, self._plan.rounds, self._chance)
            for number, fault in enumerate(kinds, 1):
                each = self._round(number, fault, probes)
                self._check(each.number)
                tell(self._line(each))
            self._judge()
        self.report.took_s = time.monotonic() - self._began_s
        return self.report

    # -- a round

    def _round(self, number: int, fault: Fault, probes: Probes) -> Round:
        self._look()
        wanted = self._plan.jobs_a_round * number - len(self._account.accepted)
        each = Round(number=number, fault=fault.name, first=self._fleet.send(max(wanted, 300)))
        self.report.rounds.append(each)
        self._await_moment()
        each.unfinished = self._fleet.unfinished()
        each.began_unix_s = time.time()
        struck = fault.strike(self._fleet, self._chance)
        self._dooms += [Doom(pid=pid, at_unix_s=each.began_unix_s) for pid in struck.doomed]
        if not probes.wait_whole(time.time(), self._look):
            self._broken(f"round {number}: not whole again after {fault.name}")
        each.recovery_s = time.time() - each.began_unix_s
        each.overtaken = self._chance.random() < _OVERTAKEN
        if not each.overtaken:
            self._await(self._no_claim_of_the_dead, what="no claim of a dead process")
        self._await(lambda: self._fleet.unfinished() < UNFINISHED, what="most jobs to end")
        return each

    def _no_claim_of_the_dead(self) -> bool:
        parents = [worker.pid for worker in self._fleet.workers]
        with self._fleet.server.client() as client:
            return not invariants.claims_of_the_dead(client, parents)

    def _await_moment(self) -> None:
        """Wait until enough jobs are unfinished: while they are sent, or some are answered."""
        wanted = UNFINISHED + _MARGIN
        most = max(wanted, int(self._plan.jobs_a_round * 0.6))
        rising = self._chance.randint(wanted, most)
        self._await(lambda: self._fleet.unfinished() >= rising, what=f"{rising} unfinished jobs")
        until_s = time.monotonic() + self._chance.choice((0.0, self._chance.uniform(0, 1)))
        while time.monotonic() < until_s and self._fleet.unfinished() > wanted:
            time.sleep(0.01)

    def _check(self, number: int) -> None:
        """See what can be seen after each round."""
        each = self.report.rounds[-1]
        if each.unfinished < UNFINISHED:
            self._broken(f"round {number}: only {each.unfinished} jobs unfinished")
        for job_id, times in self._witness.told.items():
            if times > 1:
                self._broken(f"round {number}: {job_id} was answered {times} times")
        with self._fleet.server.client() as client:
            for line in invariants.dead_letters(client):
                self._broken(f"round {number}: {line}")
        for line in invariants.strange_processes(self._fleet):
            self._broken(f"round {number}: {line}")

    # -- the end

    def _judge(self) -> None:
        wanted = self._plan.jobs_a_round * self._plan.rounds
        if len(self._account.accepted) < wanted:
            self._fleet.send(wanted - len(self._account.accepted))
            self._await(lambda: len(self._account.accepted) >= wanted, what="the last jobs")
        self._await_end()
        with self._fleet.server.client() as client:
            stored = stored_results(client)
        account = self._account
        judged = invariants.verdicts(
            account, told=self._witness.told, stored=stored, dooms=self._dooms
        )
        for line in judged.lines():
            self._broken(line)
        self._count(judged)
        self._judge_what_is_left()

    def _await_end(self) -> None:
        def ended() -> bool:
            self._look()
            with self._fleet.server.client() as client:
                return quiet(client) and not account.missing()

        account = self._account
        try:
            wait_until(ended, what="the last job", timeout_s=_LAST_JOB_S, every_s=0.2)
        except AssertionError as error:
            self._broken(str(error))

    def _judge_what_is_left(self) -> None:
        parents = [worker.pid for worker in self._fleet.workers]
        with self._fleet.server.client() as client:
            deadline_s = time.monotonic() + _CONSUMERS_GONE_S
            while strange := list(invariants.strange_consumers(client, parents)):
                if time.monotonic() > deadline_s:
                    break
                time.sleep(1)
            for line in [*strange, *invariants.left_in_redis(client)]:
                self._broken(line)
        for line in invariants.strange_processes(self._fleet):
            self._broken(line)
        statuses = self._fleet.stop()
        if any(statuses):
            self._broken(f"workers ended with {statuses} at the end")
        for process in marked(self._fleet.mark):
            self._broken(f"left behind: {process.pid} ({process.name})")

    def _count(self, judged: invariants.Verdicts) -> None:
        account, report = self._account, self.report
        report.accepted = len(account.accepted)
        report.troubles = dict(sorted(account.troubles.items()))
        counts = collections.Counter(len(starts) for starts in account.starts.values())
        report.starts = dict(sorted(counts.items()))
        for job_id in judged.lost:
            round_of(report.rounds, account.accepted[job_id]).lost += 1
        for job_id in judged.doubled:
            round_of(report.rounds, account.accepted.get(job_id, 0)).doubled += 1
        by_time = {each.began_unix_s: each for each in report.rounds}
        for starts in account.starts.values():
            for start, again in itertools.pairwise(starts):
                for doom in self._dooms:
                    if doom.ended(start) and doom.at_unix_s in by_time:
                        by_time[doom.at_unix_s].again_s.append(again.at_unix_s - doom.at_unix_s)

    # -- the books

    def _look(self) -> None:
        """Read the books, and what dead clients left unread."""
        self._account.update()
        if time.monotonic() < self._orphans_at_s:
            return
        self._orphans_at_s = time.monotonic() + _ORPHANS_EVERY_S
        if orphans := self._account.orphans():
            with self._fleet.server.client() as client:
                for job_id, text in read_results(client, orphans).items():
                    self._account.found(job_id, text)

    def _await(self, true: Callable[[], bool], *, what: str) -> None:
        def look() -> bool:
            self._look()
            return true()

        wait_until(look, what=what, timeout_s=_LAST_JOB_S)

    def _broken(self, line: str) -> None:
        if line not in self.report.broken:
            self.report.broken.append(line)
            print(f"BROKEN {line}", flush=True)

    def _line(self, each: Round) -> str:
        took_s = time.monotonic() - self._began_s
        return (
            f"{each.number:4}/{self._plan.rounds}  {each.fault:26} {each.unfinished:5} unfinished"
            f"  whole after {each.recovery_s:5.1f} s  {len(self._account.accepted):7} accepted"
            f"  {took_s / 60:5.1f} min"
        )


def run(plan: Plan, tell: Callable[[str], object]) -> Report:
    """Run one storm; what was written stays where something was broken."""
    folder = Path(tempfile.mkdtemp(prefix="fleet-storm-"))
    account = Account(folder)
    with running_fleet(plan.shape, folder, account) as fleet:
        witness = Witness(fleet.server)
        witness.start()
        wait_until(lambda: witness.began, what="the witness")
        try:
            report = Storm(plan, fleet, account, witness).run(tell)
        finally:
            witness.stop()
            if sys.exc_info()[0] is not None:
                for worker in fleet.workers:
                    (folder / f"{worker.node}.log").write_text(worker.log())
    if report.broken:
        print(f"what was written is kept in {folder}")
    else:
        shutil.rmtree(folder)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.storm", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--jobs-per-round", type=int, default=1000)
    parser.add_argument("--faults", choices=("kill", "all"), default="kill")
    parser.add_argument("--json", type=Path, help="write what was measured into this file")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    plan = Plan(
        rounds=given.rounds,
        seed=seed,
        jobs_a_round=given.jobs_per_round,
        kinds=faults.KILLS if given.faults == "kill" else faults.ALL,
    )
    report = run(plan, lambda line: print(line, flush=True))
    print(markdown(report))
    for text, times in report.troubles.items():
        print(f"clients met {times} times: {text}")
    if given.json:
        given.json.write_text(json.dumps(report.as_json(), indent=1))
    for line in report.broken:
        print(f"BROKEN {line}")
    return int(bool(report.broken))


def _on_terminate(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _on_terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A client that loses its server says so; the storm takes it away on purpose.
    logging.getLogger("producer").setLevel(logging.ERROR)
    for name in [name for name in os.environ if name.startswith("FLEET_")]:
        if name != "FLEET_TEST_SERVER":
            del os.environ[name]
    sys.exit(main())
