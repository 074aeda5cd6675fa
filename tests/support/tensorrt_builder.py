"""A workshop with TensorRT's real builder, which works without a GPU (package `tensorrt-rtx`).

The device is made up: `tensorrt-rtx` builds for every GPU it knows, and none is asked.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest

from workers.engines.cuda import Device
from workers.engines.trt_journal import Journal
from workers.plans.making import Workshop

DEVICE = Device(
    name="NVIDIA L4",
    compute_capability="8.9",
    multiprocessors=58,
    memory_bytes=23 << 30,
    driver="13.0",
)

#: Its timing cache does nothing; of TensorRT it is a part, so our code uses it.
QUIET = "ignore:.*Timing cache operations are no-ops:DeprecationWarning"


def tensorrt_rtx() -> Any:
    """Return the module, or skip the test where there is none."""
    if sys.platform != "linux":
        pytest.skip("tensorrt-rtx is for Linux and Windows")
    return pytest.importorskip(
        "tensorrt_rtx",
        reason="the package tensorrt-rtx is not installed; it is in the extra `test`",
    )


@functools.cache
def journal() -> Journal:
    """Return the one journal of this process: TensorRT keeps the first logger that it is given."""
    return Journal(tensorrt_rtx())


def workshop(device: Device = DEVICE) -> Workshop:
    return Workshop(trt=tensorrt_rtx(), journal=journal(), device=device)
