"""The real discovery on machines that are written down in `tests.support.nvml_inventories`."""

from __future__ import annotations

import dataclasses

import pynvml
import pytest

from producer.contract.errors import ConfigError
from tests.support import nvml_inventories as machines
from workers.instances import discovery
from workers.instances.devices import Devices
from workers.instances.discovery import Inventory, inventory_of
from workers.instances.instance import Kind
from workers.instances.nvml import NoGpus, Nvml
from workers.settings import WorkerSettings


def found(
    machine: machines.Inventory,
    *,
    only: str | None = None,
    has_runtime: bool = True,
    **fields: object,
) -> Inventory:
    settings = dataclasses.replace(WorkerSettings(), **fields)  # type: ignore[arg-type]
    environ = {} if only is None else {"CUDA_VISIBLE_DEVICES": only}
    return inventory_of(Nvml(machine), settings, environ, has_runtime=has_runtime)


def test_eight_gpus_are_eight_instances_each_with_its_own_uuid() -> None:
    instances = found(machines.eight_b300()).instances

    assert [each.key for each in instances] == [
        f"GPU-{number:08x}-0000-0000-0000-000000000000/0" for number in range(8)
    ]
    assert {each.kind for each in instances} == {Kind.GPU}
    assert {each.compute_capability for each in instances} == {(10, 3)}
    assert {each.memory_bytes for each in instances} == {269 * machines.GIB}


def test_a_gpu_that_is_cut_is_its_slices() -> None:
    instances = found(machines.seven_slices()).instances

    assert [each.kind for each in instances] == [Kind.MIG] * 7
    assert len({each.uuid for each in instances}) == 7
    assert {each.parent_uuid for each in instances} == {machines.gpu(0).uuid}
    assert {each.memory_bytes for each in instances} == {34 * machines.GIB}
    assert {each.compute_capability for each in instances} == {(10, 3)}


def test_whole_and_cut_gpus_stand_beside_each_other() -> None:
    inventory = found(machines.mixed())

    kinds = [each.kind for each in inventory.instances]
    assert kinds == [Kind.GPU, Kind.GPU, Kind.MIG, Kind.MIG]
    assert inventory.instances[0].compute_capability == (7, 5)
    (warning,) = inventory.warnings
    assert "GPU 3 is in MIG mode and has no slices" in warning


def test_a_gpu_that_fell_off_the_bus_is_left_out_and_named() -> None:
    inventory = found(machines.fallen())

    assert [each.uuid for each in inventory.instances] == [machines.gpu(1).uuid]
    (warning,) = inventory.warnings
    assert warning.startswith("GPU 0 is left out: ")


def test_gpus_that_may_not_be_opened_are_named_and_cores_are_used() -> None:
    inventory = found(machines.no_permission())

    assert {each.kind for each in inventory.instances} == {Kind.CPU}
    assert [warning.partition(":")[0] for warning in inventory.warnings] == [
        "GPU 0 is left out",
        "GPU 1 is left out",
    ]


def test_what_a_gpu_does_not_tell_is_unknown_and_no_fault() -> None:
    machine = machines.silent()
    (instance,) = found(machine).instances

    assert (instance.name, instance.memory_bytes, instance.compute_capability) == ("", None, None)
    reading = Nvml(machine).read(instance)
    assert set(dataclasses.asdict(reading).values()) == {None}
    assert Nvml(machine).why_lost(instance) == ("", True)


def test_a_gpu_is_read_in_our_units() -> None:
    machine = machines.eight_b300()

    reading = Nvml(machine).read(found(machine).instances[0])

    assert reading.memory_used_bytes == 2 * machines.GIB
    assert (reading.busy, reading.power_w, reading.power_limit_w) == (0.5, 612.0, 1100.0)
    assert reading.energy_j == 5000.0


def test_power_of_a_slice_is_its_whole_gpus_and_its_load_is_unknown() -> None:
    machine = machines.seven_slices()

    reading = Nvml(machine).read(found(machine).instances[3])

    assert reading.memory_total_bytes == 34 * machines.GIB
    assert (reading.busy, reading.power_w) == (None, 612.0)


def test_each_process_sees_its_one_device_by_uuid() -> None:
    for machine in (machines.eight_b300(), machines.seven_slices(), machines.mixed()):
        for instance in found(machine).instances:
            environ = instance.environ(threads=3)

            assert environ["CUDA_VISIBLE_DEVICES"] == instance.uuid
            assert environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
            assert environ["OMP_NUM_THREADS"] == "3"


def test_slots_share_a_gpu_and_have_names_of_their_own() -> None:
    instances = found(machines.seven_slices(), slots_per_gpu=2).instances

    assert len({each.key for each in instances}) == 14
    assert len({each.uuid for each in instances}) == 7


def test_a_number_takes_the_first_and_more_than_there_are_is_said() -> None:
    assert len(found(machines.eight_b300(), instances=3).instances) == 3
    inventory = found(machines.eight_b300(), instances=9)

    assert len(inventory.instances) == 8
    assert inventory.warnings == ("instances is 9: this host has 8 and runs them.",)


def test_names_choose_gpus_slices_and_cpu_slots_in_their_order() -> None:
    fifth, second = machines.gpu(5).uuid, f"{machines.gpu(2).uuid}/0"

    instances = found(machines.eight_b300(), instances=(fifth, second, "cpu/3")).instances

    assert [each.key for each in instances[:2]] == [f"{fifth}/0", second]
    assert (instances[2].kind, instances[2].slot) == (Kind.CPU, 3)


def test_a_name_that_is_not_here_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"names GPU-nosuch, which is not here.*GPU-00000000"):
        found(machines.eight_b300(), instances=("GPU-nosuch",))


@pytest.mark.parametrize("only", ["1,3", f"{machines.gpu(1).uuid},GPU-00000003"])
def test_what_cuda_may_not_see_is_not_used(only: str) -> None:
    instances = found(machines.eight_b300(), only=only).instances

    assert [each.uuid for each in instances] == [machines.gpu(1).uuid, machines.gpu(3).uuid]


@pytest.mark.parametrize("only", ["", "-1", "GPU-nosuch"])
def test_a_cuda_that_sees_nothing_means_cpu_slots_and_is_said(only: str) -> None:
    inventory = found(machines.eight_b300(), only=only)

    assert {each.kind for each in inventory.instances} == {Kind.CPU}
    assert f"CUDA_VISIBLE_DEVICES is {only!r}" in inventory.warnings[0]


def test_without_a_runtime_for_gpus_it_is_cores_and_a_line_unless_they_are_named() -> None:
    inventory = found(machines.eight_b300(), has_runtime=False)

    assert {each.kind for each in inventory.instances} == {Kind.CPU}
    assert "no runtime that computes on them" in inventory.warnings[0]
    named = found(machines.eight_b300(), has_runtime=False, instances=(machines.gpu(0).uuid,))
    assert [each.kind for each in named.instances] == [Kind.GPU]


@pytest.mark.parametrize("error", ["LibraryNotFound", "DriverNotLoaded"])
def test_a_machine_without_a_driver_has_cpu_slots_and_nothing_to_say(
    monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    machine = machines.Inventory(init=getattr(pynvml, f"NVMLError_{error}"))
    monkeypatch.setattr(discovery, "open_nvml", lambda: Nvml(machine))

    inventory = discovery.discover(WorkerSettings(), {})

    assert {each.kind for each in inventory.instances} == {Kind.CPU}
    assert inventory.warnings == ()


def test_a_driver_of_another_version_than_its_library_is_said() -> None:
    with pytest.raises(NoGpus, match="cannot be asked for GPUs"):
        Nvml(machines.Inventory(init=pynvml.NVMLError_LibRmVersionMismatch))


def test_a_gpu_that_falls_off_while_it_is_used_is_lost_at_once_and_alone() -> None:
    machine = machines.eight_b300()
    inventory = found(machine)
    devices = Devices(inventory)
    devices.look()
    assert devices.lost() == {}
    assert devices.readings()[inventory.instances[2].key]["power_w"] == 612.0

    machine.devices[2].error = pynvml.NVMLError_GpuIsLost
    devices.look()
    (lost,) = devices.lost().items()
    assert lost[0] == inventory.instances[2].key
    assert "GPU is lost" in lost[1]

    machine.devices[2].error = None
    devices.look()
    assert devices.lost() == {}


def test_an_error_that_may_pass_is_believed_when_it_stays() -> None:
    machine = machines.eight_b300()
    devices = Devices(found(machine))
    machine.devices[0].error = pynvml.NVMLError_Unknown

    for _ in range(2):
        devices.look()
        assert devices.lost() == {}
    devices.look()

    assert len(devices.lost()) == 1
