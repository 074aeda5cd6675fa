"""Processes of somebody's project (`tests.support.shop`), in an environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.environments import Environment
from tests.support.servers import TestServer
from tests.support.waiting import wait_until


class Project:
    """The project's folder, and what is run there."""

    def __init__(self, folder: Path, server: TestServer, environment: Environment) -> None:
        self._folder, self._python = folder, str(environment.python)
        shutil.copy(Path(__file__).with_name("shop.py"), folder / "shop.py")
        (folder / "workers").mkdir()
        (folder / "workers" / "__init__.py").write_text("")
        (folder / "workers" / "mail.py").write_text("SENDER = 'shop'\n")
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._environ = {**plain, "FLEET_BROKER_URL": server.url}

    def run(self) -> dict[str, Any]:
        """Try everything in the project's own process; return what came of it."""
        done = subprocess.run(
            [self._python, "-c", "import shop; shop.main()"],
            cwd=self._folder,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(json.loads(done.stdout.splitlines()[-1]))

    @contextlib.contextmanager
    def running_worker(self) -> Iterator[None]:
        """Run the project's own worker, with Celery's own pool, for the length of the block."""
        log = self._folder / "worker.log"
        command = ["-m", "celery", "-A", "shop", "worker", "-c", "1", "-n", "shop@test"]
        with log.open("wb") as sink:
            worker = subprocess.Popen(
                [self._python, *command, "-l", "INFO"],
                cwd=self._folder,
                env=self._environ,
                stdout=sink,
                stderr=sink,
            )
        try:
            wait_until(lambda: "ready." in log.read_text(), what="the project's own worker")
            yield
        finally:
            worker.terminate()
            worker.wait(timeout=30)
