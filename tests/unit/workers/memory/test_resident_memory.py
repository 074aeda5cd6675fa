"""What a model takes in its process, as people are told; in fresh processes, as instances are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import onnx_models
from tests.support.worker import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")

FREED_BEFORE = """
import numpy
from workers.memory.resident_memory import grown_bytes, resident_bytes

freed = [numpy.ones(100_000, numpy.uint8) for _ in range(300)]
del freed
before = resident_bytes()
held = [numpy.ones(100_000, numpy.uint8) for _ in range(200)]
print(grown_bytes(before))
"""

A_MODEL = """
import sys
from pathlib import Path
from workers.models import load_model
from workers.runner import ModelRunner

print(ModelRunner.load(load_model(Path(sys.argv[1])), threads=1).describe()["memory_bytes"])
"""


def printed(script: str, *words: str) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return int(ran.stdout)


def test_what_is_taken_after_memory_was_freed_is_counted_in_full() -> None:
    assert 18_000_000 < printed(FREED_BEFORE) < 30_000_000


def test_a_loaded_model_tells_what_its_weights_take(tmp_path: Path) -> None:
    onnx_models.wide(tmp_path / "model.onnx", width=4_000_000)
    (tmp_path / "model.toml").write_text('[engines]\nfp32 = "model.onnx"\n')

    taken = printed(A_MODEL, str(tmp_path))

    assert 16_000_000 < taken < 150_000_000
