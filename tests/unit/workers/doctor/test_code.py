"""Whatever a model's own Python does as it is loaded, the doctor says so, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from tests.support.worker import alive
from workers.doctor.code import why_not_loaded
from workers.models import ModelSpec, load_models


def model(config: Path, code: str) -> ModelSpec:
    """Return a model with such code, which names the runtime as well."""
    folder = config / "models" / "my"
    folder.mkdir(parents=True)
    (folder / "model.toml").write_text('code = "mine:Mine"\nruntime = "mine:Mine"\n')
    (folder / "mine.py").write_text(code)
    return load_models(config)["my"]


FIT = "class Mine:\n    def preprocess(self, inputs): return inputs\n"


def test_code_that_never_ends_is_given_up_and_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    spec = model(
        tmp_path,
        "import os, pathlib, time\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        "while True: time.sleep(1)\n",
    )

    why = why_not_loaded(spec, tmp_path, within_s=2)

    assert why == "its code is still being loaded after 2 s."
    assert not Path("/proc", pid.read_text()).exists()


@pytest.mark.parametrize("end", ["", "os._exit(3)\n"])
def test_processes_that_the_code_has_begun_are_ended(tmp_path: Path, end: str) -> None:
    pid = tmp_path / "pid"
    spec = model(
        tmp_path,
        "import os, pathlib, subprocess, sys\n"
        "sleeps = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(subprocess.Popen(sleeps).pid))\n{end}{FIT}",
    )

    why = why_not_loaded(spec, tmp_path)

    assert why == ("loading its code ended the process with status 3." if end else "")
    wait_until(lambda: not alive(int(pid.read_text())), what="its end")


@pytest.mark.parametrize(("signum", "name"), [(9, "SIGKILL"), (36, "signal 36")])
def test_code_that_kills_the_process_is_told_by_its_signal(
    tmp_path: Path, signum: int, name: str
) -> None:
    spec = model(tmp_path, f"import os\nos.kill(os.getpid(), {signum})\n")

    assert why_not_loaded(spec, tmp_path) == f"loading its code killed the process ({name})."


def test_what_the_code_prints_fills_no_disk(tmp_path: Path) -> None:
    spec = model(
        tmp_path,
        "import os, stat\n"
        "kept = [number for number in (1, 2) if stat.S_ISREG(os.fstat(number).st_mode)]\n"
        f"assert not kept, kept\n{FIT}",
    )

    assert why_not_loaded(spec, tmp_path) == ""


def test_an_error_of_the_code_is_told_without_what_a_terminal_cannot_show(tmp_path: Path) -> None:
    spec = model(tmp_path, "raise ValueError('\\x1b[31m red \\ud800')\n")

    why = why_not_loaded(spec, tmp_path)

    assert why.endswith("cannot be imported: ValueError: [31m red (mine.py, line 1)")


def test_a_project_with_a_package_of_the_same_name_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = model(tmp_path / "config", FIT)
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)

    assert why_not_loaded(spec, tmp_path / "config") == ""
