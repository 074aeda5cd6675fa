"""What is said of driver, packages, memory and precisions, from facts alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.support import nvml_inventories as machines
from workers.doctor import command, host, machine, precisions
from workers.doctor.machine import Gpu, Machine
from workers.finding import Finding, State
from workers.instances import cgroup
from workers.instances.driver import SUPPORTED, DriverRange
from workers.instances.nvml import Nvml
from workers.settings import WorkerSettings


def with_gpus(inventory: machines.Inventory, **packages: str) -> Machine:
    nvml = Nvml(inventory)
    return Machine(
        driver=nvml.driver_version(),
        cuda=nvml.cuda_version(),
        gpus=tuple(Gpu(instance=each, reading=nvml.read(each)) for each in nvml.find().instances),
        packages={name.replace("_", "-"): version for name, version in packages.items()},
    )


def test_a_driver_that_cannot_be_asked_is_an_error() -> None:
    found = machine.driver(Machine(trouble="NVIDIA's driver cannot be asked."), SUPPORTED)

    assert found.state is State.ERROR


def test_a_driver_that_nothing_asks_is_a_warning() -> None:
    here = Machine(kernel_has_driver=True)

    assert machine.driver(here, SUPPORTED).state is State.WARNING
    assert machine.driver(Machine(), SUPPORTED).state is State.OK


def test_an_old_driver_is_an_error_where_there_are_gpus_and_a_range() -> None:
    inventory = machines.eight_b300()
    inventory.driver = "570.172.08"

    assert machine.driver(with_gpus(inventory), SUPPORTED).state is State.ERROR
    assert machine.driver(with_gpus(inventory), DriverRange("")).state is State.OK
    assert machine.driver(Machine(driver="570.172.08"), SUPPORTED).state is State.OK


@pytest.mark.parametrize(
    ("version", "state"), [("13.5.0", State.OK), ("12.8.0", State.OK), ("14.0.0", State.ERROR)]
)
def test_bindings_of_a_newer_cuda_than_the_drivers_are_an_error(version: str, state: State) -> None:
    here = with_gpus(machines.eight_b300(), cuda_bindings=version)

    assert machine.cuda(here).state is state


def test_missing_packages_are_a_warning_only_where_there_are_gpus() -> None:
    with_some, without = with_gpus(machines.eight_b300()), Machine()

    for look in (machine.cuda, machine.tensorrt):
        assert (look(with_some).state, look(without).state) == (State.WARNING, State.OK)


@pytest.mark.parametrize(
    ("version", "state"), [("11.4.0.106", State.OK), ("10.16.1.11", State.ERROR)]
)
def test_tensorrt_before_11_is_an_error(version: str, state: State) -> None:
    here = with_gpus(machines.eight_b300(), tensorrt=version)

    assert machine.tensorrt(here).state is state


def test_there_is_one_onnx_runtime_and_one_alone() -> None:
    both = {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.32.0"}

    assert machine.onnxruntime(Machine()).state is State.ERROR
    assert machine.onnxruntime(Machine(packages=both)).state is State.ERROR
    assert machine.onnxruntime(Machine(packages={"onnxruntime": "1.32.0"})).state is State.OK


def test_memory_that_nobody_of_ours_holds_is_a_warning() -> None:
    # Of 15 GiB 2 are taken.
    (old, *_) = machine.gpus(with_gpus(machines.Inventory(machines.gpu(0, memory=15 << 30))), {})
    key = f"{machines.gpu(0).uuid}/0"
    held, *_ = machine.gpus(
        with_gpus(machines.Inventory(machines.gpu(0, memory=15 << 30))), {key: "w1@there"}
    )
    (unknown, *_) = machine.gpus(with_gpus(machines.silent()), {})

    assert (old.state, held.state, unknown.state) == (State.WARNING, State.OK, State.OK)
    assert "held by w1@there" in held.text
    assert "does not tell its memory" in unknown.text


@pytest.mark.parametrize(
    ("capability", "precision", "state"),
    [
        ((10, 3), "int8", State.WARNING),
        ((10, 3), "fp8", None),
        ((10, 0), "int8", None),
        ((8, 0), "fp8", State.ERROR),
        ((8, 9), "fp8", None),
        ((7, 5), "bf16", State.ERROR),
        ((7, 5), "fp32", None),
        ((99, 0), "int8", None),
        ((7, 0), "fp8", State.ERROR),
    ],
)
def test_a_precision_that_does_not_suit_a_gpu_is_found(
    capability: tuple[int, int], precision: str, state: State | None
) -> None:
    found = list(precisions.unfit([("m", precision)], [capability]))

    assert [each.state for each in found] == ([state] if state else [])


def test_a_gpu_that_is_in_no_table_is_said_so() -> None:
    (found,) = precisions.fast([(99, 0)])

    assert "in no table" in found.text


def test_more_memory_than_there_is_and_more_threads_than_cores_are_warnings(
    tmp_path: Path,
) -> None:
    here = dataclasses.replace(host.read_host(tmp_path), cores=2.0, memory_bytes=4 << 30)
    most = WorkerSettings(memory_limit_bytes=1 << 30, threads=2)

    assert host.memory(here, most, 4).state is State.OK
    assert host.memory(here, most, 5).state is State.WARNING
    assert host.memory(here, WorkerSettings(), 50).state is State.OK
    assert host.cores(here, most).state is State.OK
    assert host.cores(here, WorkerSettings(threads=3)).state is State.WARNING


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/a\n", {"memory.max": "max", "a/memory.max": "4096"}, 4096),
        ("0::/a\n", {"memory.max": "1024", "a/memory.max": "4096"}, 1024),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": "2048"}, 2048),
        ("", {}, None),
    ],
)
def test_the_least_memory_that_a_cgroup_grants_is_the_limit(
    tmp_path: Path, own: str, files: dict[str, str], limit: int | None
) -> None:
    for name, text in {**files, "self": own}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert cgroup.memory_limit_bytes(tmp_path, tmp_path / "self") == limit


@pytest.mark.parametrize(
    ("states", "strict", "code"),
    [
        ([State.OK], True, 0),
        ([State.OK, State.WARNING], False, 0),
        ([State.OK, State.WARNING], True, 1),
        ([State.WARNING, State.ERROR], False, 2),
        ([State.WARNING, State.ERROR], True, 2),
    ],
)
def test_the_exit_code_is_that_of_the_worst(states: list[State], strict: bool, code: int) -> None:
    findings = [Finding("x", state, "text") for state in states]

    assert command.exit_code(findings, strict=strict) == code
