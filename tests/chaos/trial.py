"""A fleet on trial: everything that a storm needs, from the first process to the verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.chaos.account import Account
from tests.chaos.faults import Fault
from tests.chaos.fleet import Fleet, Shape, running_fleet
from tests.chaos.judge import Judge
from tests.chaos.recovery import LOOK_EVERY_S, Probes
from tests.chaos.table import Report, Round
from tests.chaos.witness import Witness


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A fleet that works, and who watches it."""

    fleet: Fleet
    account: Account
    witness: Witness
    probes: Probes
    judge: Judge
    report: Report
    chance: random.Random
    #: Whether to wait for what takes its time: a dead parent's consumers live for another minute.
    patient: bool
    began_s: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def minutes(self) -> float:
        """How long it goes on."""
        return (time.monotonic() - self.began_s) / 60

    def strike(self, fault: Fault, first: int) -> Round:
        """Let a fault strike, and wait until the fleet is whole again.

        ``first``: no job that may suffer from it has a lower number.
        """
        number = len(self.report.rounds) + 1
        each = Round(number=number, fault=fault.name, which=fault.which, first=first)
        self.report.rounds.append(each)
        each.unfinished = self.fleet.unfinished()
        began_unix_s = time.time()
        self.judge.doom(fault.strike(self.fleet, self.chance), each)
        since_unix_s = time.time()
        self.judge.wait(
            lambda: self.probes.whole(since_unix_s),
            what=f"a whole fleet after {fault.which or fault.name}",
            every_s=LOOK_EVERY_S,
        )
        each.recovery_s = time.time() - began_unix_s
        return each

    def end(self) -> Report:
        """Judge, and return what was measured."""
        self.judge.judge(patient=self.patient)
        self.report.took_s = time.monotonic() - self.began_s
        return self.report


@contextlib.contextmanager
def trial(shape: Shape, seed: int, *, patient: bool = True) -> Iterator[Trial]:
    """Put a fleet on trial for the length of the block.

    No process of it is left; what they wrote is kept where an invariant is broken.
    """
    folder = Path(tempfile.mkdtemp(prefix="fleet-storm-"))
    report = Report(seed=seed, server="")
    whole = False
    try:
        with _watched(shape, folder, report, seed=seed, patient=patient) as on_trial:
            yield on_trial
        whole = not report.broken
    except KeyboardInterrupt:
        whole = True
        raise
    finally:
        if whole:
            shutil.rmtree(folder)
        else:
            print(f"what the processes wrote is kept in {folder}")


@contextlib.contextmanager
def _watched(
    shape: Shape, folder: Path, report: Report, *, seed: int, patient: bool
) -> Iterator[Trial]:
    account = Account(folder)
    with running_fleet(shape, folder, account) as fleet:
        report.server = _server(fleet)
        with Witness(fleet.server) as witness, Probes(fleet, account) as probes:
            yield Trial(
                fleet=fleet,
                account=account,
                witness=witness,
                probes=probes,
                judge=Judge(fleet, account, witness, report),
                report=report,
                chance=random.Random(seed),
                patient=patient,
            )


def _server(fleet: Fleet) -> str:
    with fleet.server.client() as client:
        info: Any = client.info("server")
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info['redis_version']}"
