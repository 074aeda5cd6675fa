"""Processes of a stock Celery app, in a folder where `producer` cannot be imported."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.support.environments import Environment
from tests.support.servers import TestServer
from tests.support.waiting import wait_until

_IMPORTS: Final = "import json\nfrom celery import chord\nfrom stock import *\n"


class Stock:
    """The app's folder, and what is run there: with the packages of these tests, or those of an
    environment of its own.
    """

    def __init__(
        self, folder: Path, server: TestServer, environment: Environment | None = None
    ) -> None:
        self._folder = folder
        python = environment.python if environment else sys.executable
        packages = environment.packages if environment else sysconfig.get_path("purelib")
        # Without `site` no installed package can put the clone onto the path.
        self._python = (str(python), "-S")
        shutil.copy(Path(__file__).with_name("stock_app.py"), folder / "stock.py")
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        path = os.pathsep.join([str(folder), str(packages)])
        self._environ = {**plain, "STOCK_URL": server.url, "PYTHONPATH": path}

    def ask(self, expression: str) -> Any:
        """Return the value of a Python expression in the app's own process."""
        code = f"{_IMPORTS}print(json.dumps({expression}))"
        done = subprocess.run(
            [*self._python, "-c", code],
            cwd=self._folder,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    @contextlib.contextmanager
    def running_worker(self) -> Iterator[None]:
        """Run the app's own worker for the length of the block."""
        log = self._folder / "worker.log"
        with log.open("wb") as sink:
            worker = subprocess.Popen(
                [
                    *self._python,
                    "-m",
                    "celery",
                    "-A",
                    "stock",
                    "worker",
                    "-P",
                    "solo",
                    "-l",
                    "INFO",
                ],
                cwd=self._folder,
                env=self._environ,
                stdout=sink,
                stderr=sink,
            )
        try:
            wait_until(lambda: "ready." in log.read_text(), what="the app's own worker")
            yield
        finally:
            worker.kill()
            worker.wait(timeout=30)
