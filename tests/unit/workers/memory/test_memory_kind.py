"""Instances that share what they know of ceilings: those in which the same batches fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.onnx_models import DIGITS
from workers.engines.base import open_engine
from workers.memory.memory_kind import memory_kind
from workers.models import load_model


@pytest.mark.parametrize(
    "other",
    [
        {"memory_limit_bytes": 2 << 20},
        {"memory_first_chunk_bytes": 4096},
        {"memory_shared_by": ("digits", "another")},
        {"precision": "fp16"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_decides_how_much_fits_keeps_instances_apart(other: dict[str, Any]) -> None:
    spec = load_model(DIGITS)
    engine = open_engine(spec, "fp32", threads=1)

    kinds = [memory_kind(each, engine) for each in (spec, dataclasses.replace(spec, **other))]

    assert memory_kind(spec, engine) == kinds[0]
    assert kinds[0] != kinds[1]
    engine.close()
