"""A batch axis that takes any number of rows, where the exporter fixed it."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from workers.build.graph import copied
from workers.models import ModelSpec

_NAME = "rows"


def with_free_batch(model: onnx.ModelProto, spec: ModelSpec) -> onnx.ModelProto | None:
    """Return a copy of ``model`` with free batch axes, ``None`` where there is none to free.

    An axis of exactly one row is freed; a larger one only where the model's file declares it as
    batch axis, for it may count something else. Whether the graph bears it is for the probe.
    """
    copy = copied(model)
    weights = {tensor.name for tensor in copy.graph.initializer}
    inputs = [value for value in copy.graph.input if value.name not in weights]
    freed = [value.name for value in inputs if _free(value, spec.batch_axes_in)]
    if not freed:
        return None
    for value in copy.graph.output:
        _free(value, spec.batch_axes_out)
    # What the exporter noted about tensors in between holds for its number of rows alone.
    del copy.graph.value_info[:]
    return copy


def _free(value: onnx.ValueInfoProto, axes: Mapping[str, int | None]) -> bool:
    """Free the batch axis of ``value`` if that is fixed; return whether it was."""
    axis = axes.get(value.name, 0)
    sizes = value.type.tensor_type.shape.dim
    if axis is None or axis >= len(sizes) or not sizes[axis].HasField("dim_value"):
        return False
    if sizes[axis].dim_value != 1 and value.name not in axes:
        return False
    sizes[axis].dim_param = _NAME
    return True
