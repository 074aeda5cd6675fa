"""A whole fleet on this machine, for as long as a command runs: a broker, a worker, Flower.

The parts of `fleet up` and `fleet demo`; each is a context manager that leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from producer.contract.errors import ConfigError
from producer.contract.names import Keys
from producer.contract.reach import reach
from producer.contract.settings import Settings
from workers import children, preflight
from workers.models import load_models
from workers.settings import WorkerSettings
from workers.telemetry.flower_access import Access
from workers.up.address import Address, free_port
from workers.up.embedded import Server, embedded_server

_CLONE: Final = Path(__file__).resolve().parents[2]
_FLOWER_CONFIG: Final = "flowerconfig.py"
_FLOWER_PORT: Final = 5555
_LOOK_EVERY_S: Final = 0.1

#: States an instance passes through before it can answer.
_NOT_YET: Final = frozenset({"starting", "loading"})

#: What one worker says of itself in Redis.
Words = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """The server that jobs go through."""

    settings: Settings
    #: What processes beside us are started with, so that they use the same server.
    environ: Mapping[str, str] = dataclasses.field(repr=False)
    #: The embedded one; None when FLEET_BROKER_URL names the server.
    server: Server | None

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        return self.server.process if self.server else None

    @property
    def keys(self) -> Keys:
        return Keys(prefix=self.settings.prefix)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker process that we started."""

    node: str
    process: subprocess.Popen[bytes]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flower:
    """A Flower that we started."""

    port: int
    access: Access
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def answers(self) -> bool:
        """Whether it has come so far that a browser finds it."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def is_on_its_way(self) -> bool:
        """Whether it runs, and does not answer yet."""
        return self.process.poll() is None and not self.answers


@contextlib.contextmanager
def broker(
    worker: WorkerSettings, environ: Mapping[str, str], *, kept: Path | None = None
) -> Iterator[Broker]:
    """Use the server of FLEET_BROKER_URL, or run one, which keeps what it knows in ``kept``; either
    is fit for ``worker`` by then.
    """
    # Before anything is started: a mistake in a file needs no server to be found.
    load_models(worker.config_dir, worker.models or None)
    with contextlib.ExitStack() as stack:
        server = None
        url = environ.get("FLEET_BROKER_URL")
        own = Address.kept_in(kept) if kept else None
        # A shell in which an app was given our address names no other server with it.
        if not url or (own and own.is_meant_by(url)):
            server = stack.enter_context(embedded_server(kept))
            url = server.url
        settings = Settings.from_env({**environ, "FLEET_BROKER_URL": url})
        preflight.check(worker, settings)
        yield Broker(
            settings=settings,
            environ=_for_children(environ, url),
            server=server,
        )


@contextlib.contextmanager
def worker(
    broker: Broker,
    *,
    grace_s: float,
    environ: Mapping[str, str] | None = None,
    output: Path | None = None,
    log_level: str = "warning",
) -> Iterator[Worker]:
    """Run one worker for the length of the block, then drain it."""
    # A name of its own: on a shared broker two workers of one name would spoil remote control.
    node = f"fleet-{os.getpid()}@{socket.gethostname()}"
    command = [*_celery("worker"), "--hostname", node, "--loglevel", log_level]
    with children.running(
        command,
        environ={**broker.environ, **(environ or {})},
        within_s=grace_s + 10,
        output=output,
    ) as process:
        yield Worker(node=node, process=process)


@contextlib.contextmanager
def flower(broker: Broker, config_dir: Path) -> Iterator[Flower]:
    """Run Flower for the length of the block, on the loopback and with a password."""
    if importlib.util.find_spec("flower") is None:
        raise ConfigError('Flower is not installed: pip install -e ".[flower]"')
    access = Access.from_env(broker.environ)
    port = _FLOWER_PORT if _is_free(_FLOWER_PORT) else free_port()
    # Warnings aside: it asks workers as it starts, and says that none answered yet.
    command = [
        *(*_celery("flower"), f"--conf={_flower_config(config_dir)}"),
        *("--address=127.0.0.1", f"--port={port}", "--logging=error"),
    ]
    environ = {**broker.environ, **access.variable}
    with children.running(command, environ=environ, within_s=5) as process:
        yield Flower(port=port, access=access, process=process)


def _flower_config(config_dir: Path) -> Path:
    """Return the folder's own file, else the clone's: without either Flower would be open."""
    own = config_dir / _FLOWER_CONFIG
    return own if own.exists() else _CLONE / "configs" / _FLOWER_CONFIG


def wait_until_ready(
    broker: Broker, worker: Worker, *, tell: Callable[[str], None], within_s: float
) -> Words:
    """Return the worker's words once no instance is on its way; ``tell`` says where they are.

    ConfigError when the worker ended, or when none of its instances can load its models.
    """
    deadline = time.monotonic() + within_s
    with reach(broker.settings.broker_url) as client:
        while time.monotonic() < deadline:
            if (code := worker.process.poll()) is not None:
                raise ConfigError(f"The worker ended with exit code {code} before it was ready.")
            text = client.get(broker.keys.worker(worker.node))
            words: Words = json.loads(text) if text else {}
            instances = words.get("instances", [])
            states = [instance["state"] for instance in instances]
            tell(", ".join(states) or words.get("waiting") or "starting")
            if states and not _NOT_YET.intersection(states):
                return _usable(words)
            time.sleep(_LOOK_EVERY_S)
    raise ConfigError(f"The worker is not ready after {within_s:g} s.")


def _usable(words: Words) -> Words:
    served = (model for instance in words["instances"] for model in instance["models"].values())
    if not any(model.get("state") == "ready" for model in served):
        raise ConfigError(f"No instance can serve its models: {troubles(words)}")
    return words


def troubles(words: Words) -> str:
    """Return what the instances say of models they cannot load; empty when there are none."""
    told = {i["text"] for i in words["instances"] if i["state"] in ("broken", "ready")}
    return "; ".join(sorted(told - {""}))


def _celery(command: str) -> list[str]:
    return [sys.executable, "-m", "celery", "--quiet", "-A", "workers.app", command]


def _for_children(environ: Mapping[str, str], url: str) -> dict[str, str]:
    paths = [os.fspath(_CLONE), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "FLEET_BROKER_URL": url, "PYTHONPATH": os.pathsep.join(paths)}


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
