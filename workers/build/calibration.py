"""The ranges of tensors inside a model, seen while it runs rows of its user."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from workers.build.graph import at_opset
from workers.build.rows import Rows
from workers.engines.base import open_engine
from workers.models import ModelSpec

#: What a mask adds to be as good as minus infinity; no range of values reaches so far.
LIKE_INFINITY: Final = 1e30

#: The first that knows Where.
_OPSET: Final = 9

_LIMIT, _ZERO = "fleet_limit", "fleet_zero"
_ABS, _LESS, _REAL, _MAX = (
    f"{{}}_fleet_{part}" for part in ("absolute", "less", "real", "largest")
)


def with_ranges(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return a copy of ``model`` that also answers the largest magnitude of each tensor."""
    copy = at_opset(model, _OPSET)
    copy.graph.initializer.extend(
        [
            numpy_helper.from_array(np.array(LIKE_INFINITY, np.float32), _LIMIT),
            numpy_helper.from_array(np.array(0, np.float32), _ZERO),
        ]
    )
    for name in names:
        absolute, less, real, largest = (part.format(name) for part in (_ABS, _LESS, _REAL, _MAX))
        copy.graph.node.extend(
            [
                helper.make_node("Abs", [name], [absolute], name=absolute),
                helper.make_node("Less", [absolute, _LIMIT], [less], name=less),
                helper.make_node("Where", [less, absolute, _ZERO], [real], name=real),
                helper.make_node("ReduceMax", [real], [largest], name=largest, keepdims=0),
            ]
        )
        copy.graph.output.append(helper.make_tensor_value_info(largest, onnx.TensorProto.FLOAT, []))
    return copy


def ranges(
    spec: ModelSpec,
    path: Path,
    names: Sequence[str],
    rows: Rows,
    *,
    size: int,
    threads: int,
    advance: Callable[[], None],
) -> dict[str, float]:
    """Return the largest magnitude of each tensor of ``path``, made by ``with_ranges``."""
    alone = dataclasses.replace(
        spec, engines={"fp32": path}, precision="fp32", memory_limit_bytes=None
    )
    found = dict.fromkeys(names, 0.0)
    engine = open_engine(alone, "fp32", threads=threads)
    try:
        for feeds in rows.batches(size):
            answers = engine.run(feeds)
            for name, largest in found.items():
                found[name] = max(largest, float(answers[_MAX.format(name)]))
            advance()
    finally:
        engine.close()
    return found
