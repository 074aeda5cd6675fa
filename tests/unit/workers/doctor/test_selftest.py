"""The GPU tests where no GPU is, and the report that a self-test writes of them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import FLEET, run_command
from tests.support.nvml_inventories import environ_of
from tests.support.worker import ROOT
from workers.doctor import selftest
from workers.doctor.selftest import Outcome
from workers.finding import Finding, State
from workers.instances.nvml import NoGpus, open_nvml

TESTS = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))

XML = """<testsuites><testsuite>
<testcase name="test_copies" time="1.5"><system-out>--- Captured Out ---
to the device 50.1 GB/s

</system-out></testcase>
<testcase name="test_plans" time="0.1"><failure message="AssertionError:
  too | slow">trace</failure></testcase>
<testcase name="test_broken" time="0"><error message="no fixture">trace</error></testcase>
<testcase name="test_cuda" time="0"><skipped message="no provider">where</skipped></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def without_a_gpu() -> None:
    try:
        open_nvml()
    except NoGpus:
        return
    pytest.skip("a GPU is here")


@pytest.mark.usefixtures("without_a_gpu")
def test_every_test_of_a_gpu_is_collected_and_skipped_with_the_reason() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout
    assert " skipped" in ran.stdout.splitlines()[-1]
    assert "passed" not in ran.stdout.splitlines()[-1]
    reasons = [line for line in ran.stdout.splitlines() if line.startswith("SKIPPED")]
    assert len(reasons) >= 7
    assert [line for line in reasons if "no NVIDIA GPU here: there is no driver" not in line] == []


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_every_test_there_is_marked(path: Path) -> None:
    assert "pytest.mark.gpu" in path.read_text()


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_what_the_tests_call_of_cuda_is_there(path: Path) -> None:
    runtime: Any = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings: Linux only")

    named = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("cudart", "runtime")
    }

    assert [name for name in named if not hasattr(runtime, name)] == []


@pytest.mark.usefixtures("without_a_gpu")
def test_without_a_gpu_it_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    report = tmp_path / "report.md"

    ran = run_command(*FLEET, "doctor", "--selftest", "--report", str(report))

    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert line.startswith("fleet: --selftest needs an NVIDIA GPU, and there is none here")
    assert not report.exists()


@pytest.mark.usefixtures("without_a_gpu")
def test_without_pytest_it_says_the_command_that_installs_it(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    hidden = "import sys; sys.modules['pytest'] = None; from producer.cli import main; main()"
    command = [sys.executable, "-c", hidden, "doctor", "--selftest", "--report", str(report)]

    ran = subprocess.run(
        command,
        check=False,
        env={**os.environ, **environ_of("silent")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert line.startswith("fleet: --selftest needs pytest. ")
    assert line.endswith('pip install -e ".[cli,worker-gpu,tensorrt,embedded,test]"')
    assert not report.exists()


@pytest.mark.usefixtures("without_a_gpu")
def test_where_nothing_could_run_the_report_says_why_and_it_is_exit_code_2(tmp_path: Path) -> None:
    """NVML of a machine that is written by hand finds a GPU; CUDA's driver is not here."""
    report = tmp_path / "report.md"
    environ = {**environ_of("silent"), "CUDA_VISIBLE_DEVICES": "GPU-nosuch"}

    ran = run_command(*FLEET, "doctor", "--selftest", "--report", str(report), **environ)

    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert f"The report is {report}." in ran.stdout
    text = report.read_text()
    assert "0 passed, 0 failed" in text
    assert "| two minutes of load are answered on the card | skipped |" in text
    assert "finds none that may be used" in text
    assert "- driver: " in text


def test_outcomes_are_read_with_what_they_printed_and_why() -> None:
    copies, plans, broken, cuda = selftest.read_outcomes(XML)

    assert (copies.state, copies.seconds) == ("passed", 1.5)
    assert copies.printed == "to the device 50.1 GB/s"
    assert (plans.state, plans.why) == ("failed", "AssertionError: too | slow")
    assert (broken.state, cuda.state, cuda.why) == ("failed", "skipped", "no provider")


def test_the_report_shows_each_test_what_it_measured_and_the_machine() -> None:
    findings = [Finding("driver", State.OK, "580.105.08.")]
    outcomes = selftest.read_outcomes(XML)

    text = "\n".join(selftest.lines(findings, outcomes, began_unix_s=0, in_time=False))

    assert "# Self-test of 1970-01-01 00:00 UTC" in text
    assert "1 passed, 2 failed, 1 skipped. It was ended after 300 s" in text
    assert "| plans | failed | 0.1 | AssertionError: too / slow |" in text
    assert "    to the device 50.1 GB/s" in text
    assert "- driver: ok. 580.105.08." in text


@pytest.mark.parametrize(
    ("states", "in_time", "well"),
    [
        (["passed", "skipped"], True, True),
        (["passed", "passed"], False, False),
        (["passed", "failed"], True, False),
        (["skipped"], True, False),
        ([], True, False),
    ],
)
def test_it_is_well_when_something_ran_and_nothing_failed(
    states: list[str], in_time: bool, well: bool
) -> None:
    outcomes = [Outcome(name="test_x", state=state, seconds=1) for state in states]

    assert selftest.is_well(outcomes, in_time=in_time) is well
