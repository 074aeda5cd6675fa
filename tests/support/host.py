"""Workers that share the CPU slots of one host, as containers of one compose service do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.occupancy import Occupancy
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, alive, config_folder

MODEL: Final = "scripted"


class Host:
    """Any number of workers of one configuration, the oldest first."""

    def __init__(self, server: TestServer, config: Path, log: Path) -> None:
        self._server, self._config = server, config
        self.log = log
        self.workers: list[Worker] = []
        #: Those that were stopped, too.
        self._all: list[Worker] = []

    def add(self, count: int = 1) -> list[Worker]:
        """Start ``count`` more; returns at once."""
        new = []
        for _ in range(count):
            worker = Worker(self._server, self._config, {}, f"w{len(self._all) + 1}")
            self._all.append(worker)
            worker.start()
            new.append(worker)
        self.workers += new
        return new

    def stop(self, *workers: Worker) -> list[int]:
        """End workers in good order, all at once; returns their exit statuses."""
        for worker in workers:
            assert worker.process is not None
            worker.process.terminate()
        for worker in workers:
            self.workers.remove(worker)
        return [worker.process.wait(60) for worker in workers if worker.process is not None]

    def parts(self) -> list[int]:
        """Return how many processes each worker has, as the kernel knows them."""
        return [len(worker.instance_pids()) for worker in self.workers]

    def ready(self) -> list[int]:
        """Return how many instances of each worker are ready, as it says."""
        return [len(worker.ready_pids()) for worker in self.workers]

    def wait_parts(self, *parts: int, timeout_s: float = 60) -> None:
        """Wait until every worker has its part and all of it is ready."""
        wait_until(
            lambda: self.parts() == self.ready() == list(parts),
            what=f"{parts} instances",
            timeout_s=timeout_s,
            every_s=0.1,
        )

    def kill(self) -> None:
        """Leave nothing behind."""
        children: list[int] = []
        for worker in self._all:
            assert worker.process is not None
            if worker.process.poll() is None:
                children += worker.instance_pids()
                worker.process.kill()
                worker.process.wait(30)
            worker.folder.cleanup()
            worker.client.connection_pool.disconnect()
        wait_until(lambda: not any(map(alive, children)), what="no orphan")


@contextlib.contextmanager
def running_host(
    server: TestServer, log: Path, *, instances: int, batch_s: float = 0.2, **settings: Any
) -> Iterator[tuple[Host, Occupancy]]:
    """Make a host of ``instances`` CPU slots without a worker; nothing of it is left."""
    model: Mapping[str, Any] = {
        **SCRIPTED,
        "max_batch_size": 4,
        "options": {"log": str(log), "batch_s": batch_s},
    }
    with (
        config_folder({MODEL: model}) as config,
        Occupancy(log) as occupancy,
        contextlib.ExitStack() as stack,
    ):
        lines = {"instances": instances, **settings}
        text = "".join(f"{key} = {value}\n" for key, value in lines.items())
        (config / "fleet.toml").write_text(text)
        host = Host(server, config, log)
        stack.callback(host.kill)
        yield host, occupancy
