"""What an instance process is given before it imports anything, and when it must not begin."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import nvml_inventories as machines
from tests.support.waiting import wait_until
from workers.hello import Lease
from workers.instances import clock
from workers.instances.discovery import inventory_of
from workers.instances.instance import Instance
from workers.instances.nvml import Nvml
from workers.parent import process
from workers.parent.process import InstanceProcess
from workers.settings import WorkerSettings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what a process has")


@contextlib.contextmanager
def started(instance: Instance, *, lease_s: float) -> Iterator[InstanceProcess]:
    """Start the process of ``instance`` as a parent does; nothing of it is left."""
    made = process.start(
        node="w@test",
        slot=0,
        number=1,
        models=[],
        lease=Lease(
            instance=instance.key,
            host="host",
            token="w@test/1.1",
            ttl_s=15,
            until_s=clock.now_s() + lease_s,
        ),
        environ=instance.environ(threads=2),
        log_level="INFO",
    )
    try:
        yield made
    finally:
        made.kill(by_us=True)
        made.close()


def environ_of(pid: int) -> dict[str, str]:
    """Return the variables that a process was started with, once the kernel shows them."""
    shown = Path(f"/proc/{pid}/environ")
    text = wait_until(shown.read_bytes, what="its variables").decode()
    return dict(line.split("=", 1) for line in text.split("\0") if line)


def found(machine: machines.Inventory) -> tuple[Instance, ...]:
    return inventory_of(Nvml(machine), WorkerSettings(), {}, has_runtime=True).instances


@pytest.mark.parametrize("machine", [machines.eight_b300(), machines.seven_slices()])
def test_every_process_is_born_with_its_one_device(machine: machines.Inventory) -> None:
    for instance in found(machine):
        with started(instance, lease_s=60) as running:
            environ = environ_of(running.pid)

        assert environ["CUDA_VISIBLE_DEVICES"] == instance.uuid
        assert environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert environ["OMP_NUM_THREADS"] == "2"
        assert environ["FLEET_INSTANCE_KEY"] == instance.key


def test_a_process_whose_parent_stood_still_for_too_long_does_not_begin() -> None:
    with started(found(machines.eight_b300())[0], lease_s=-1) as late:
        assert wait_until(late.popen.poll, what="its end") == os.EX_TEMPFAIL
        assert late.read() is False
