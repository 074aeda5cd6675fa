"""A worker's memory limit holds for all its models together; each in a process of its own, for an
arena is registered for the whole process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import onnx_models

ROOT = onnx_models.DIGITS.parent.parent.parent

SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np
from workers.loading import Loading
from workers.settings import WorkerSettings
from workers.status import Status

class Nobody:
    def exchange(self, *args): pass

folder, limit, how, *names = sys.argv[1:]
settings = WorkerSettings(
    config_dir=Path(folder), memory_limit_bytes=int(limit), memory_first_chunk_bytes=4096
)
status = Status()
loading = Loading(settings, names[:1] if how == "later" else names, status, Nobody())
loading.load(loading.due())
loading.follow(names)
loading.load(loading.due())
found = {name: model.get("text") for name, model in status.models.items()}
for name, runner in loading.runners.items():
    job = runner.prepare({"x": np.ones((1, 1), np.float32)})
    found[name] = max(outcome.batch_size for outcome in runner.run([job] * 32))
print(json.dumps(found))
"""


def loaded(tmp_path: Path, limit_bytes: int, *widths: int, how: str = "at once") -> Any:
    """Return, for a model of each width, the refusal or the largest batch of 32 jobs.

    ``how``: all at the start, or those after the first ``later``.
    """
    names = [f"wide{number}" for number in range(len(widths))]
    for name, width in zip(names, widths, strict=True):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        onnx_models.wide(folder / "model.onnx", width=width)
        (folder / "model.toml").write_text('[engines]\nfp32 = "model.onnx"\n')
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(limit_bytes), how, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_models_that_fit_together_have_what_their_weights_leave(tmp_path: Path) -> None:
    # 32 rows of the smaller model take 8 MiB; alone under the limit they would all fit at once.
    found = loaded(tmp_path, 10 << 20, 1 << 16, 1 << 20)

    assert found["wide0"] == 16
    assert found["wide1"] == 1


def test_the_model_that_no_longer_fits_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    found = loaded(tmp_path, 8 << 20, 1 << 16, 2 << 20, 1 << 16)

    assert "all models of this worker (wide0, wide1, wide2)" in found["wide1"]
    assert "most of it wide1 in fp32 with 83" in found["wide1"]
    assert found["wide0"] == found["wide2"] == 16


def test_where_the_weights_of_all_are_too_much_the_largest_is_named(tmp_path: Path) -> None:
    found = loaded(tmp_path, 9 << 20, 1 << 20, 2 << 20)

    assert found["wide0"] == 1
    assert "most of it wide1 in fp32 with 83" in found["wide1"]


def test_a_model_that_leaves_no_room_for_a_row_of_another_is_refused(tmp_path: Path) -> None:
    # 4 MiB of weights and 4 for a row, of 9; the other's weights would take 2.
    found = loaded(tmp_path, 9 << 20, 1 << 20, 1 << 19)

    assert found["wide0"] == 1
    assert "one row of wide0 no longer fits beside it" in found["wide1"]
    assert re.search(
        r"most of it wide0 in fp32 with 41\d{5}, wide1 in fp32 20\d{5}:", found["wide1"]
    )


def test_a_model_that_is_added_later_has_to_fit_beside_the_others(tmp_path: Path) -> None:
    found = loaded(tmp_path, 9 << 20, 1 << 20, 2 << 20, 1 << 10, how="later")

    assert (found["wide0"], found["wide2"]) == (1, 32)
    assert re.search(
        r"most of it wide1 in fp32 with 83\d{5}, wide0 in fp32 41\d{5};", found["wide1"]
    )
