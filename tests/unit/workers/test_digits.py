"""The project's own model: the files are the ones that were measured, and they read digits."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tests.onnx_models import DIGITS
from workers.engines.base import open_engine
from workers.models import load_model


def test_every_committed_file_has_its_checksum() -> None:
    lines = (DIGITS / "SHA256SUMS").read_text().splitlines()

    for expected, name in (line.split() for line in lines):
        assert hashlib.sha256((DIGITS.parent / name).read_bytes()).hexdigest() == expected
    assert len(lines) == 6


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_held_out_digits_are_read(precision: str) -> None:
    held_out = np.load(DIGITS / "heldout.npz", allow_pickle=False)
    engine = open_engine(load_model(DIGITS), precision, threads=1)

    scores = engine.run({"image": (held_out["images"] / 16).astype(np.float32)[:, None]})["scores"]

    assert len(scores) == 540
    assert (scores.argmax(axis=1) == held_out["labels"]).mean() >= 0.985
