"""A model's own Python that never ends does not hold up the doctor."""

from __future__ import annotations

from pathlib import Path

from workers.doctor.code import why_not_loaded
from workers.models import load_models


def test_code_that_never_ends_is_given_up_and_ended(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "my"
    folder.mkdir(parents=True)
    (folder / "model.toml").write_text('code = "mine:Mine"\nruntime = "x:Y"\n')
    pid = tmp_path / "pid"
    (folder / "mine.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        "while True: time.sleep(1)\n"
    )
    spec = load_models(tmp_path)["my"]

    why = why_not_loaded(spec, tmp_path, within_s=2)

    assert why == "its code is still being loaded after 2 s."
    assert not Path("/proc", pid.read_text()).exists()
