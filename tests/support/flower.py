"""Flower itself, in a process of its own, and its pages."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.ports import kept_port
from tests.support.waiting import wait_until
from tests.support.worker import ROOT

Json = Any

LOGIN = "someone:a-password"


class Flower:
    """One Flower process, started as docs/flower.md says."""

    def __init__(self, url: str, folder: Path, port: int, *options: str, **environ: str) -> None:
        self.port, self._log = port, folder / "flower.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "celery", "-A", "workers.app", "flower"),
                    *("--conf=configs/flowerconfig.py", f"--port={self.port}"),
                    *options,
                ],
                cwd=ROOT,
                env={**os.environ, "FLEET_BROKER_URL": url, "PYTHONWARNINGS": "ignore", **environ},
                stdout=log,
                stderr=log,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_answers(self) -> None:
        wait_until(self._answers, what="Flower to answer", timeout_s=40)

    def get(self, path: str, login: str | None = LOGIN, *, method: str = "GET") -> tuple[int, str]:
        """Return the status and the text of a page."""
        return get(self.port, path, login, method=method)

    def page(self, path: str) -> str:
        status, text = self.get(path)
        assert status == 200, f"{path}: {status}\n{text[-2000:]}\n{self.said[-2000:]}"
        return text

    def json(self, path: str) -> Json:
        return json.loads(self.page(path))

    def workers(self) -> dict[str, Json]:
        """Return the rows of the worker page by node name."""
        return {row["hostname"]: row for row in self.json("/workers?json=1")["data"]}

    def queues(self) -> dict[str, Json]:
        """Return the rows of the broker page by queue."""
        return {row["name"]: row for row in self.json("/api/queues/length")["active_queues"]}

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.said
        return answers(self.port)


def get(port: int, path: str, login: str | None, *, method: str = "GET") -> tuple[int, str]:
    """Return the status and the text of a page of the Flower at ``port``."""
    word = None if login is None else base64.b64encode(login.encode()).decode()
    return send(port, path, word and f"Basic {word}", method=method)


def send(port: int, path: str, header: str | None, *, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    if header is not None:
        request.add_header("Authorization", header)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def answers(port: int) -> bool:
    """Return whether there is a Flower at ``port`` yet."""
    with contextlib.suppress(OSError):
        return bool(get(port, "/", None)[0])
    return False


@contextlib.contextmanager
def running_flower(url: str, folder: Path, *options: str, **environ: str) -> Iterator[Flower]:
    with kept_port() as port:
        started = Flower(url, folder, port, *options, **environ)
        try:
            started.wait_answers()
            yield started
        finally:
            started.process.kill()
            started.process.wait(timeout=10)
