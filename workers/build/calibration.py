"""The ranges of tensors inside a model, seen while it runs rows of its user."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from producer.contract.errors import ConfigError
from workers.build.rows import Rows
from workers.engines.base import open_engine
from workers.models import ModelSpec

_ABS, _MAX = "{}_fleet_abs", "{}_fleet_max"


def with_ranges(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return a copy of ``model`` that also answers the largest magnitude of each tensor."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for name in names:
        absolute, largest = _ABS.format(name), _MAX.format(name)
        copy.graph.node.extend(
            [
                helper.make_node("Abs", [name], [absolute], name=absolute),
                helper.make_node("ReduceMax", [absolute], [largest], name=largest, keepdims=0),
            ]
        )
        copy.graph.output.append(onnx.ValueInfoProto(name=largest))
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
    """Return the largest magnitude of each float32 tensor of ``path``, made by ``with_ranges``.

    A tensor of another kind is left out.
    """
    alone = dataclasses.replace(
        spec, engines={"fp32": path}, precision="fp32", memory_limit_bytes=None
    )
    found = dict.fromkeys(names, 0.0)
    engine = open_engine(alone, "fp32", threads=threads)
    try:
        for feeds in rows.batches(size):
            answers = engine.run(feeds)
            for name in tuple(found):
                value = answers[_MAX.format(name)]
                if value.dtype != np.float32:
                    del found[name]
                elif not np.isfinite(value):
                    raise ConfigError(
                        f"{rows.origin}: the values of {name!r} inside the model are not finite."
                    )
                else:
                    found[name] = max(found[name], float(value))
            advance()
    finally:
        engine.close()
    return found
