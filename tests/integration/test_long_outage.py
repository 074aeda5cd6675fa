"""While there is no server nobody works, and an app that asks again and again goes on when there is
one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kombu.exceptions import OperationalError

from producer.client import Client
from producer.contract.names import Keys, Priority, queue_of
from producer.contract.settings import Settings
from tests.support.engines import row
from tests.support.servers import running_server
from tests.support.worker import ROOT, SCRIPTED, config_folder, running_worker

pytestmark = pytest.mark.redis

#: More than redis-py's own bound for one pool.
TRIES = 150


def test_a_client_that_was_refused_many_times_sends_when_the_server_is_back() -> None:
    with running_server() as server, Client(Settings(broker_url=server.url)) as client:
        server.kill()
        for _ in range(TRIES):
            with pytest.raises(OperationalError, match="refused"):
                client.submit("m", {"x": row()})
        server.start()

        client.submit("m", {"x": row()})

        with server.client() as redis:
            assert redis.xlen(Keys().stream(queue_of("m"), Priority.NORMAL)) == 1


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the CPU that was used")
def test_nobody_is_busy_with_asking_for_a_server_that_is_not_there() -> None:
    """Connections that were good for a while before it went, of apps that wait and of a worker."""
    with (
        running_server() as server,
        config_folder({"scripted": SCRIPTED}) as config,
        running_worker(server, config) as worker,
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.waiting_app"],
            cwd=ROOT,
            env={**os.environ, "FLEET_BROKER_URL": server.url},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as app,
    ):
        try:
            assert app.stdout is not None
            assert app.stdout.readline() == b"waiting\n"
            time.sleep(2)
            server.kill()
            # The first attempts come at once.
            time.sleep(0.5)
            pids = [app.pid, worker.pid, *worker.instance_pids()]
            before = {pid: cpu_s(pid) for pid in pids}
            time.sleep(4)
            used = {pid: cpu_s(pid) - before[pid] for pid in pids}
        finally:
            app.kill()

    assert len(used) == 3
    assert max(used.values()) < 1, used
