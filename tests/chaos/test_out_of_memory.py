"""Memory that the system refuses: by a limit of the address space, which the runtime is told of,
and by a limit of the container, which kills the process.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from producer.client import Client, Job, Reply
from producer.contract.settings import Settings
from tests import onnx_models
from tests.support.queues import assert_all_ended
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import Worker, config_folder, running_worker

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="such limits are kept on Linux alone"),
]

MODEL = "wide"
JOBS, MOST_OUT_OF_MEMORY = 320, 3
#: Floats of one row while it runs: 8 MiB.
WIDTH = 1 << 21
#: Above what a process takes that has answered one job: a batch of 32 in FP32 needs 256 MiB.
ROOM_BYTES = 220 << 20
#: The same, when a process that is started anew has to fit as well.
CONTAINER_BYTES = 160 << 20

_RAN_OUT = re.compile(r"engine\.out_of_memory .*precision=(\S+) rows=(\d+)")
_HELD_KIB = re.compile(r"RssAnon:\s+(\d+) kB")
_CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def client(broker: TestServer) -> Iterator[Client]:
    with Client(Settings(broker_url=broker.url)) as client:
        yield client


@pytest.fixture
def config() -> Iterator[Path]:
    engines = {"fp32": "wide.onnx", "fp16": "wide_fp16.onnx"}
    with config_folder({MODEL: {"max_batch_size": 32, "engines": engines}}) as folder:
        path = folder / "models" / MODEL / "wide.onnx"
        onnx_models.wide(path, width=WIDTH)
        onnx_models.in_fp16(path)
        yield folder


def one() -> npt.NDArray[np.float32]:
    return np.ones((1, 1), dtype=np.float32)


def submit(client: Client, count: int) -> list[Job]:
    return client.submit_many(MODEL, ({"x": one()} for _ in range(count)))


def replies(client: Client, jobs: Sequence[Job]) -> list[Reply]:
    """Return the reply of each job; all must have one."""
    return [job.reply(0) for job in client.as_completed(jobs, timeout_s=120)]


def ran_out(worker: Worker) -> list[tuple[str, str]]:
    return _RAN_OUT.findall(worker.log())


def ready(worker: Worker, client: Client, *, but: int = 0) -> int:
    """Return the one instance, another than ``but``, after its first job."""
    wait_until(lambda: worker.ready_pids() - {but}, what="the instance")
    client.submit(MODEL, {"x": one()}).reply(timeout_s=30)
    (pid,) = worker.ready_pids()
    return pid


def oom_score(pid: int) -> int:
    """Return how much the kernel prefers to end a process over others of its size."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def limit_address_space(pid: int) -> None:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM_BYTES
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def test_320_jobs_under_a_limit_of_the_address_space_with_a_kill_in_between(
    broker: TestServer, client: Client, config: Path
) -> None:
    with running_worker(broker, config) as worker:
        first = ready(worker, client)
        limit_address_space(first)
        answered = replies(client, submit(client, JOBS // 2))
        before = ran_out(worker)
        os.kill(first, signal.SIGKILL)
        second = ready(worker, client, but=first)
        limit_address_space(second)
        later = replies(client, submit(client, JOBS // 2))
        lacks = ran_out(worker)
        pids = worker.instance_pids()

    fallen = [reply for reply in answered if reply.out_of_memory]
    assert 1 <= len(before) <= MOST_OUT_OF_MEMORY
    assert {(reply.precision, reply.batch_size) for reply in fallen} == {("fp16", 16)}
    assert lacks == before
    assert {reply.precision for reply in later} == {"fp32"}
    assert max(reply.batch_size for reply in later) <= 16
    # No process died of it.
    assert pids == [second]
    assert len({round(float(reply.outputs["y"].item()), 3) for reply in answered + later}) == 1


class MemoryGroup:
    """A group of processes that the kernel ends one of when all together take too much."""

    def __init__(self, folder: Path, *, limit: str) -> None:
        self._folder, self._limit = folder, limit

    def add(self, pid: int) -> None:
        """Take in a process, and whatever it starts from now on."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def allow(self, more_bytes: int) -> None:
        """Allow so much more than what its processes hold now."""
        pids = (self._folder / "cgroup.procs").read_text().split()
        said = (Path(f"/proc/{pid}/status").read_text() for pid in pids)
        held = sum(int(_HELD_KIB.findall(text)[0]) for text in said)
        (self._folder / self._limit).write_text(str(held * 1024 + more_bytes))


@pytest.fixture
def memory_group() -> Iterator[MemoryGroup]:
    """Make a group of our own at the root of the memory controller, as Docker does, or skip."""
    old = (_CGROUPS / "memory" / "memory.limit_in_bytes").exists()
    root = _CGROUPS / "memory" if old else _CGROUPS
    folder = root / f"fleet-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if old else "memory.max"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory group can be made here: {error}")
    try:
        if not (folder / limit).exists():
            pytest.skip("no memory group can be made here: its parent does not control memory")
        yield MemoryGroup(folder, limit=limit)
    finally:
        with contextlib.suppress(FileNotFoundError):
            wait_until(lambda: not (folder / "cgroup.procs").read_text(), what="an empty group")
            folder.rmdir()


def test_a_process_that_the_container_s_limit_kills_leaves_its_jobs_and_its_parent(
    broker: TestServer, client: Client, config: Path, memory_group: MemoryGroup
) -> None:
    with running_worker(broker, config, wait=False) as worker:
        # Before it starts an instance: what a process holds already is counted elsewhere.
        memory_group.add(worker.pid)
        first = ready(worker, client)
        assert oom_score(first) > oom_score(worker.pid)
        memory_group.allow(CONTAINER_BYTES)
        try:
            answered = replies(client, submit(client, 64))
        except TimeoutError as error:
            raise AssertionError(worker.log()[-5000:]) from error
        status = worker.stop()
        log = worker.log()

    assert len(answered) == 64
    assert "was killed by SIGKILL" in log
    alone = [reply for reply in answered if reply.attempts == 2]
    assert len(alone) >= 32
    assert {reply.batch_size for reply in alone} == {1}
    assert max(reply.attempts for reply in answered) == 2
    assert status == 0
    assert_all_ended(broker, MODEL)
