"""NVML on a real driver, and a process that sees its one device and no other."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from workers.instances.driver import SUPPORTED
from workers.instances.instance import Instance, Kind
from workers.instances.nvml import Nvml

pytestmark = pytest.mark.gpu

#: What a process that was pinned says of the devices that CUDA shows it.
_LOOK = """
import json
from cuda.bindings import runtime

error, count = runtime.cudaGetDeviceCount()
assert int(error) == 0, error
error, device = runtime.cudaGetDeviceProperties(0)
assert int(error) == 0, error
error, free, total = runtime.cudaMemGetInfo()
assert int(error) == 0, error
print(json.dumps({
    "count": count,
    "uuid": bytes(device.uuid.bytes).hex(),
    "capability": [device.major, device.minor],
    "total": total,
}))
"""


def test_nvml_tells_what_an_instance_needs_to_know(nvml: Nvml, card: Instance) -> None:
    reading = nvml.read(card)
    print(f"{card.name}, {card.key}, driver {nvml.driver_version()}, CUDA {nvml.cuda_version()}")
    print(json.dumps(dataclasses.asdict(reading)))

    assert nvml.driver_version()
    assert card.compute_capability is not None
    assert card.memory_bytes
    assert reading.memory_total_bytes == card.memory_bytes
    assert nvml.why_lost(card) == ("", True)


def test_the_driver_is_one_that_the_fleet_allows(nvml: Nvml) -> None:
    assert SUPPORTED.allows(nvml.driver_version()), (
        f"{nvml.driver_version()} is outside {SUPPORTED.text}; set `driver` in fleet.toml to use it"
    )


@pytest.mark.usefixtures("cuda")
def test_a_pinned_process_sees_its_one_device(card: Instance) -> None:
    said = _pinned(card)

    assert said["count"] == 1
    assert tuple(said["capability"]) == card.compute_capability
    if card.kind is Kind.GPU:
        # CUDA tells the UUID of the whole GPU also to a process on a slice.
        assert said["uuid"] == card.uuid.removeprefix("GPU-").replace("-", "")
    assert said["total"] <= (card.memory_bytes or 0)


@pytest.mark.usefixtures("cuda")
def test_every_device_can_be_pinned_by_its_uuid(nvml: Nvml) -> None:
    instances = nvml.find().instances
    uuids = [_pinned(each)["uuid"] for each in instances if each.kind is Kind.GPU]
    print(f"{len(instances)} GPUs and slices, {len(uuids)} of them whole")

    assert len(set(uuids)) == len(uuids)


def _pinned(instance: Instance) -> dict[str, Any]:
    """Return what a process of ``instance`` sees."""
    ran = subprocess.run(
        [sys.executable, "-c", _LOOK],
        env={**os.environ, **instance.environ(threads=1)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said: dict[str, Any] = json.loads(ran.stdout)
    return said
