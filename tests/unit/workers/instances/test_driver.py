"""Which drivers a worker may run on, and that it runs on no other."""

from __future__ import annotations

import dataclasses

import pynvml
import pytest

from producer.contract.errors import ConfigError
from tests.support import nvml_inventories as machines
from workers.instances.discovery import Inventory, inventory_of
from workers.instances.driver import DriverRange
from workers.instances.nvml import Nvml
from workers.settings import WorkerSettings

LOCK = DriverRange(">=580.82,<600")


def on(machine: machines.Inventory, *, has_runtime: bool = True, **fields: object) -> Inventory:
    settings = dataclasses.replace(WorkerSettings(), **fields)  # type: ignore[arg-type]
    return inventory_of(Nvml(machine), settings, {}, has_runtime=has_runtime)


@pytest.mark.parametrize("version", ["580.82", "580.82.07", "580.105.08", "595.9", "599.999"])
def test_a_driver_within_the_range_is_allowed(version: str) -> None:
    assert LOCK.allows(version)


@pytest.mark.parametrize(
    "version",
    ["580", "580.9", "580.81.99", "570.172.08", "600", "600.0.1", "1000.1", "", "R580.82"],
)
def test_a_driver_outside_it_or_without_a_version_is_not(version: str) -> None:
    assert not LOCK.allows(version)


@pytest.mark.parametrize(
    ("text", "version", "allowed"),
    [
        ("==580.82.07", "580.82.7", True),
        ("==580.82", "580.82.07", False),
        (">580.82", "580.82.0", False),
        ("<= 580.82 , > 570", "580.82", True),
        ("", "1.0", True),
        ("", "", True),
    ],
)
def test_bounds_are_compared_by_numbers(text: str, version: str, allowed: bool) -> None:
    assert DriverRange(text).allows(version) is allowed


@pytest.mark.parametrize("text", ["580", ">=580,", "~=580", ">=", ">=580.x", "580 - 600", ","])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no bound"):
        DriverRange(text)


def test_a_worker_starts_on_gpus_whose_driver_is_within_the_range() -> None:
    inventory = on(machines.eight_b300())

    assert len(inventory.instances) == 8
    assert inventory.warnings == ()


@pytest.mark.parametrize("driver", ["570.172.08", "610.10"])
def test_a_worker_refuses_gpus_whose_driver_is_outside_it(driver: str) -> None:
    machine = machines.seven_slices()
    machine.driver = driver

    with pytest.raises(ConfigError) as refused:
        on(machine)

    assert f"NVIDIA's driver is {driver}" in str(refused.value)
    assert 'driver = ">=580.82,<600"' in str(refused.value)


def test_a_driver_that_tells_no_version_is_refused_too() -> None:
    machine = machines.eight_b300()
    machine.driver = pynvml.NVMLError_NoPermission

    with pytest.raises(ConfigError, match="does not tell its version"):
        on(machine)


def test_a_lock_that_is_taken_off_lets_every_driver_in() -> None:
    machine = machines.eight_b300()
    machine.driver = "610.10"

    assert len(on(machine, driver=DriverRange("")).instances) == 8


def test_a_worker_on_cpu_slots_does_not_care() -> None:
    machine = machines.eight_b300()
    machine.driver = "570.172.08"

    named = on(machine, instances=("cpu/0",))
    without = on(machine, has_runtime=False)

    assert {each.kind for each in (*named.instances, *without.instances)} == {"cpu"}
