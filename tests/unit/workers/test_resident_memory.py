"""What a model takes in its process, as it is told to people."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests import onnx_models
from workers.models import load_model
from workers.resident_memory import grown_bytes, resident_bytes
from workers.runner import ModelRunner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


def test_what_is_taken_after_memory_was_freed_is_counted_in_full() -> None:
    freed = [bytes(100_000) for _ in range(300)]
    del freed

    before = resident_bytes()
    held = [np.ones(100_000, np.uint8) for _ in range(200)]
    grown = grown_bytes(before)

    assert grown is not None
    assert sum(array.nbytes for array in held) * 0.9 < grown < 40_000_000


def test_a_loaded_model_tells_what_its_weights_take(tmp_path: Path) -> None:
    onnx_models.wide(tmp_path / "model.onnx", width=4_000_000)
    (tmp_path / "model.toml").write_text('[engines]\nfp32 = "model.onnx"\n')

    runner = ModelRunner.load(load_model(tmp_path), threads=1)

    size = (tmp_path / "model.onnx").stat().st_size
    taken = runner.describe()["memory_bytes"]
    runner.close()
    assert size * 0.9 < taken < 3 * size + 50_000_000
