"""One instance process as its parent sees it: started, spoken to, heard, ended."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workers.hello import Hello, Lease
from workers.orders import DRAIN, serve_line, stop_serving_line
from workers.parent.code_on_disk import ROOT
from workers.parent.holders import holder_name

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, kw_only=True)
class InstanceProcess:
    """A running instance."""

    consumer: str
    popen: subprocess.Popen[bytes]
    report_fd: int
    began_s: float
    #: The models it was told to serve.
    models: tuple[str, ...]
    #: What it said last; empty until it spoke.
    said: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    said_at_s: float = 0.0
    #: Whether it was ready once: then its load cannot have killed it.
    was_ready: bool = False
    told_to_drain: bool = False
    #: Whether its end is our doing, so that the starts of its jobs are taken back.
    ended_by_us: bool = False
    #: Why the watcher killed it, if it did.
    killed_because: str = ""
    #: Whether it was killed for a batch that ran too long.
    timed_out: bool = False
    #: And the stream and entry id of the job that ran alone in it, if one did.
    timed_out_alone: str = ""
    _unread: bytes = b""

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def state(self) -> str:
        return str(self.said.get("state", "starting"))

    @property
    def is_settled(self) -> bool:
        """Whether it has loaded what it was told to serve, or said why it cannot."""
        return set(self.said.get("models", ())) == set(self.models)

    @property
    def loaded(self) -> frozenset[str]:
        """The models that it holds, and serves."""
        about = self.said.get("models", {})
        return frozenset(name for name, its in about.items() if its["state"] == "ready")

    def greet(self, hello: Hello) -> None:
        """Tell it who it is. If it died at once, the end of its report pipe will be seen."""
        try:
            assert self.popen.stdin is not None
            self.popen.stdin.write(hello.line())
            self.popen.stdin.flush()
            os.set_blocking(self.popen.stdin.fileno(), False)
        except OSError:
            logger.warning("instance.stillborn", extra={"slot": hello.slot, "pid": self.pid})

    def read(self) -> bool:
        """Take in what it reported; False when its end of the pipe is closed."""
        chunk = os.read(self.report_fd, 65536)
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        if lines:
            self.said, self.said_at_s = json.loads(lines[-1]), time.monotonic()
            self.was_ready = self.was_ready or self.state == "ready"
        return bool(chunk)

    def drain(self) -> None:
        """Tell it to claim nothing more; one that still loads is ended, for it holds nothing."""
        self.told_to_drain = True
        if self.state in ("starting", "loading"):
            self.kill(by_us=True)
        else:
            self.tell(DRAIN)

    def serve(self, models: Iterable[str]) -> None:
        """Tell it to load those of ``models`` that it does not serve."""
        for model in models:
            if model not in self.models and self.tell(serve_line(model)):
                self.models = (*self.models, model)

    def serve_none_but(self, models: Sequence[str]) -> None:
        """Tell it to serve no other than ``models``."""
        for model in self.models:
            if model not in models and self.tell(stop_serving_line(model)):
                self.models = tuple(name for name in self.models if name != model)

    def tell(self, order: str) -> bool:
        """Give it an order of `workers.orders`, and return whether it was given; one that is gone,
        or hears nothing, is not waited for.
        """
        line = f"{order}\n".encode()
        if len(line) > select.PIPE_BUF:
            # It would not be written as a whole. No id of ours is so long.
            return False
        try:
            assert self.popen.stdin is not None
            # Not through the buffer: a signal's handler may come in while another order is written.
            os.write(self.popen.stdin.fileno(), line)
        except OSError as error:
            logger.info("instance.deaf", extra={"pid": self.pid, "error": type(error).__name__})
            return False
        return True

    def kill(self, *, by_us: bool, because: str = "") -> None:
        """End it at once; ``by_us`` takes back the starts of what it ran."""
        self.ended_by_us = self.ended_by_us or by_us
        self.killed_because = self.killed_because or because
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGKILL)

    def close(self) -> int:
        """Reap it and free its pipes; returns its exit status, negative for a signal."""
        if self.popen.stdin is not None:
            try:
                self.popen.stdin.close()
            except OSError:
                logger.debug("instance.pipe_broken", extra={"pid": self.pid})
        os.close(self.report_fd)
        return self.popen.wait()


def start(
    *,
    node: str,
    slot: int,
    number: int,
    models: Sequence[str],
    lease: Lease,
    environ: Mapping[str, str],
    log_level: str,
) -> InstanceProcess:
    """Start one instance as a fresh interpreter: nothing of this process is inherited but three
    pipes. ``environ`` is its own: it stands before anything is imported.

    The thread that calls this must last as long as this process: the kernel ends the child when the
    thread that started it ends. Raises OSError where the machine has no room for a process.
    """
    popen, read_fd, write_fd = _spawn(environ)
    running = InstanceProcess(
        consumer=holder_name(node=node, slot=slot, number=number, pid=popen.pid),
        popen=popen,
        report_fd=read_fd,
        began_s=time.monotonic(),
        models=tuple(models),
    )
    running.greet(
        Hello(
            node=node,
            slot=slot,
            consumer=running.consumer,
            models=list(models),
            lease=lease,
            report_fd=write_fd,
            log_level=log_level,
        )
    )
    return running


def _spawn(environ: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int, int]:
    """Return the process, our end of its report pipe, and its own end's number there."""
    read_fd, write_fd = os.pipe()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        popen = subprocess.Popen(
            [sys.executable, "-m", "workers.birth", str(os.getpid())],
            stdin=subprocess.PIPE,
            pass_fds=(write_fd,),
            env={**os.environ, "PYTHONPATH": path, **environ},
        )
    except OSError:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return popen, read_fd, write_fd
