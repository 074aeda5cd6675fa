"""TensorRT's parser and builder, which work without a GPU (package `tensorrt-rtx`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

Shape = tuple[int, ...]


def plan_bytes(path: Path, shapes: Mapping[str, tuple[Shape, Shape, Shape]]) -> int:
    """Parse ``path`` and build a plan for an L4 with one profile; return the plan's size.

    AssertionError says what the parser or the builder did not take.
    """
    if sys.platform != "linux":
        pytest.skip("tensorrt-rtx is for Linux and Windows")
    trt: Any = pytest.importorskip(
        "tensorrt_rtx",
        reason="the package tensorrt-rtx is not installed; it is in the extra `test`",
    )
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)

    parsed = parser.parse_from_file(str(path))

    assert parsed, [parser.get_error(number).desc() for number in range(parser.num_errors)]
    assert network.num_outputs
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    profile = builder.create_optimization_profile()
    names = {network.get_input(number).name for number in range(network.num_inputs)}
    assert names == set(shapes)
    for name, (least, usual, most) in shapes.items():
        profile.set_shape(name, least, usual, most)
    assert config.add_optimization_profile(profile) >= 0
    plan = builder.build_serialized_network(network, config)
    assert plan is not None
    return int(plan.nbytes)
